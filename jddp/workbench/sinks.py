"""Sinks of TensorBoard and of Weights & Biases, by the words of `report.sinks`.

Both show these charts:

    loss/train, loss/eval, accuracy/eval       the loss and each metric, training and evaluation
    optimizer/learning_rate, time/step_seconds and so on, by group
    recall/eval                                a metric that is an array: a table
    samples, ...                               text, images and histograms that callbacks log
"""

import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jddp.config.files import dump_values
from jddp.ground.errors import ConfigError
from jddp.ground.files import make_folder, replace_file
from jddp.ground.typing import Record
from jddp.trainer.reports.lines import array_lines
from jddp.trainer.reports.sinks import Start

PAGE_COLUMNS = 240  # Width of a page.
_GROUPS = {
    "optimizer": ("learning_rate", "grad_norm", "loss_scale", "skipped", "spike"),
    "time": ("epoch", "step_seconds", "data_wait_seconds", "host_seconds"),
    "speed": ("examples_per_second", "tokens_per_second", "model_flops_per_second", "mfu"),
    "memory": ("peak_memory_bytes", "predicted_memory_bytes"),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}


def by_kind(record: Record) -> Iterator[tuple[str, str, Any]]:
    """Yields each value of a record after its kind and its chart.

    Kinds are number, list, and of a callback's record also text, images, which are uint8 `(n, h, w,
    channels)`, and numbers, the finite ones of another array.
    """
    for name, value in record.items():
        if name in _GROUP_OF:
            chart = f"{_GROUP_OF[name]}/{name}"
        else:
            chart = name if record["split"] == "callback" else f"{name}/{record['split']}"
        if name in ("step", "split"):
            continue
        if isinstance(value, int | float):
            yield "number", chart, value
        elif isinstance(value, list):
            yield "list", chart, value
        elif isinstance(value, str) and record["split"] == "callback":
            yield "text", chart, value
        elif isinstance(value, np.ndarray) and value.dtype == np.uint8:
            by_channel = value[..., None] if value.ndim == 2 else value
            yield "images", chart, by_channel[None] if by_channel.ndim == 3 else by_channel
        elif isinstance(value, np.ndarray) and (finite := value[np.isfinite(value)]).size:
            yield "numbers", chart, finite


class TensorBoard:
    """A sink that writes event files, which `tensorboard --logdir RUNS` shows.

    They also have the config, as text. If a run resumes, TensorBoard hides the earlier values of
    steps that are taken again.

    Args:
      start: The start of the run.
    """

    package = "tensorboardX"

    def __init__(self, start: Start) -> None:
        from tensorboardX import SummaryWriter  # The import changes loggers and warnings.

        resumed = {"purge_step": start.step + 1} if start.step else {}
        suffix = f".{start.step}"  # A start within the same second has a file of its own.
        self._writer = SummaryWriter(str(start.run_dir), filename_suffix=suffix, **resumed)
        if start.config:
            self._writer.add_text("config", _as_typed(dump_values(start.config).splitlines()))
        self._writer.flush()

    def log(self, record: Record) -> None:
        """Adds the values of a record."""
        step = record["step"]
        for kind, chart, value in by_kind(record):
            if kind == "number":
                self._writer.add_scalar(chart, value, step)
            elif kind == "list":
                self._writer.add_text(chart, _as_typed(array_lines(value, PAGE_COLUMNS)), step)
            elif kind == "text":
                self._writer.add_text(chart, _as_typed(value.splitlines()), step)
            elif kind == "images":
                self._writer.add_images(chart, value, step, dataformats="NHWC")
            else:
                self._writer.add_histogram(chart, value, step)
        self._writer.flush()  # A page shows the values now, and they survive a kill.

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


def _as_typed(lines: Iterable[str]) -> str:
    """Markdown that shows lines as they are."""
    return "\n".join(f"    {line}" for line in lines)


class WeightsAndBiases:
    """A sink that logs to Weights & Biases; a run that resumes keeps its id.

    With WANDB_MODE=offline it is a local run, which `wandb sync` uploads. Its own variables and
    files choose project, team and mode (WANDB_PROJECT, WANDB_ENTITY), and have the credentials.

    Args:
      start: The start of the run.

    Raises:
      ConfigError: If there are no credentials.
    """

    package = "wandb"

    def __init__(self, start: Start) -> None:
        import wandb

        run_dir = start.run_dir
        assert run_dir is not None  # `Options` requires a folder.

        # Checked here, because `wandb.init` would ask for a key in the middle of the progress.
        is_online = wandb.setup().settings.mode == "online"
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ConfigError("no credentials. Call `wandb login`, or set WANDB_MODE=offline.")
        self._wandb = wandb
        self._run = wandb.init(
            dir=run_dir,
            name=run_dir.name,
            id=_id_of(run_dir / "wandb"),
            resume="allow",
            config=dict(start.config),
            settings=wandb.Settings(console="off"),  # The terminal belongs to the loop.
        )
        # W&B's own step counts calls and never goes back, and a training step may log twice.
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        """Logs the values of a record."""
        shown = {"step": record["step"]}
        for kind, chart, value in by_kind(record):
            if kind == "list":
                rows = np.array(value, object)
                rows = rows.reshape(-1, rows.shape[-1])
                columns = [*map(str, range(rows.shape[-1]))]
                shown[chart] = self._wandb.Table(data=rows.tolist(), columns=columns)
            elif kind == "images":
                shown[chart] = [self._wandb.Image(image) for image in value]
            else:
                shown[chart] = self._wandb.Histogram(value) if kind == "numbers" else value
        self._run.log(shown)

    def close(self) -> None:
        """Waits until all is uploaded."""
        self._run.finish()


def _id_of(folder: Path) -> str:
    """The id of the run, which the first start chooses."""
    file = folder / "id"
    if not file.exists():
        make_folder(folder)
        replace_file(file, secrets.token_hex(4).encode())
    return file.read_text()
