"""Boards that show the records of runs: TensorBoard, and Weights & Biases.

loss/train, loss/eval, accuracy/eval       the loss and each metric, training and evaluation
optimizer/learning_rate, time/step_seconds and so on, by group
recall/eval                                a metric that is an array: a histogram, and a table
samples, ...                               text, images and histograms that callbacks log
"""

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jddp.config.files import dump_values
from jddp.ground.errors import ConfigError
from jddp.ground.files import make_folder, replace_file
from jddp.ground.typing import Record, Settings
from jddp.trainer.reports.lines import array_lines

COLUMNS = 240  # of a page
_GROUPS = {
    "optimizer": ("learning_rate", "grad_norm", "loss_scale", "skipped", "spike"),
    "time": ("epoch", "step_seconds", "data_wait_seconds", "host_seconds", "exposed_communication"),
    "processes": ("slowest_process", "slowest_ratio"),
    "speed": ("examples_per_second", "tokens_per_second", "model_flops_per_second", "mfu"),
    "memory": ("peak_memory_bytes", "predicted_memory_bytes"),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}


def chart_of(name: str, split: str) -> str:
    """Returns the chart of a value, after its group and a slash."""
    if name in _GROUP_OF:
        return f"{_GROUP_OF[name]}/{name}"
    return f"{name}/{split}" if split in ("train", "eval") else name


def by_kind(record: Record) -> Iterator[tuple[str, str, Any]]:
    """Yields each value of a record after its kind and its chart.

    Kinds are number, list, and of a callback's record also text, images, which are uint8 `(n, h, w,
    channels)`, and numbers, the finite ones of another array.
    """
    for name, value in record.items():
        chart = chart_of(name, record["split"])
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
        elif isinstance(value, np.ndarray):
            yield "numbers", chart, value[np.isfinite(value)]


def _finite(values: Sequence[object]) -> list[float]:
    """The finite numbers of a list; none of a list of lists."""
    return [x for x in values if isinstance(x, int | float) and math.isfinite(x)]


class TensorBoard:
    """A sink that writes event files, which `tensorboard --logdir RUNS` shows.

    They also have the config, as text. If a run resumes, TensorBoard hides the earlier values of
    steps that are taken again.

    Args:
      run_dir: Run directory.
      config: Config of the run.
      step: Number of finished steps.
    """

    def __init__(self, run_dir: Path | None, config: Settings, step: int) -> None:
        from tensorboardX import SummaryWriter  # which changes loggers and warnings

        resumed = {"purge_step": step + 1} if step else {}
        suffix = f".{step}"  # A start within the same second has a file of its own.
        self._writer = SummaryWriter(str(run_dir), filename_suffix=suffix, **resumed)
        if config:
            self._writer.add_text("config", _as_typed(dump_values(config).splitlines()))
        self._writer.flush()

    def log(self, record: Record) -> None:
        """Adds the values of a record."""
        step = record["step"]
        for kind, chart, value in by_kind(record):
            if kind == "number":
                self._writer.add_scalar(chart, value, step)
            elif kind == "list":
                self._add_list(chart, value, step)
            elif kind == "text":
                self._writer.add_text(chart, _as_typed(value.splitlines()), step)
            elif kind == "images":
                self._writer.add_images(chart, value, step, dataformats="NHWC")
            else:
                self._add_histogram(chart, value, step)
        self._writer.flush()  # A page shows it now, and a process that is killed keeps it.

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()

    def _add_list(self, chart: str, values: list[object], step: int) -> None:
        if numbers := _finite(values):
            self._add_histogram(chart, np.array(numbers), step)
        self._writer.add_text(chart, _as_typed(array_lines(values, COLUMNS)), step)

    def _add_histogram(self, chart: str, numbers: np.ndarray, step: int) -> None:
        try:
            self._writer.add_histogram(chart, numbers, step)
        except ValueError as error:  # None is finite, or all are beyond 1e20.
            self._writer.add_text(chart, f"no histogram: {error}", step)


def _as_typed(lines: Iterable[str]) -> str:
    """Markdown that shows lines as they are."""
    return "\n".join(f"    {line}" for line in lines)


class WeightsAndBiases:
    """A sink that logs to Weights & Biases; a run that resumes keeps its id.

    With WANDB_MODE=offline it is a local run, which `wandb sync` uploads. Its own variables and
    files choose project, team and mode (WANDB_PROJECT, WANDB_ENTITY), and have the credentials.

    Args:
      run_dir: Run directory.
      config: Config of the run.
      step: Number of finished steps.

    Raises:
      ConfigError: If there are no credentials.
    """

    def __init__(self, run_dir: Path | None, config: Settings, step: int) -> None:
        import wandb

        assert run_dir is not None  # as `Options` requires

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
            config=dict(config),
            settings=wandb.Settings(console="off"),  # The terminal belongs to the loop.
        )
        # W&B's own step counts calls and never goes back, and a training step may log twice.
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        """Logs the values of a record."""
        shown = {"step": record["step"]}
        for kind, chart, value in by_kind(record):
            if kind == "list":
                shown[chart] = self._shown(value)
            elif kind == "images":
                shown[chart] = [self._wandb.Image(image) for image in value]
            else:
                shown[chart] = self._wandb.Histogram(value) if kind == "numbers" else value
        self._run.log(shown)

    def close(self) -> None:
        """Waits until all is uploaded."""
        self._run.finish()

    def _shown(self, values: list[Any]) -> object:
        """A table of a list of lists, a histogram of a list of numbers."""
        shape = np.shape(values)
        if len(shape) == 2:
            return self._wandb.Table(data=values, columns=[str(i) for i in range(shape[1])])
        return self._wandb.Histogram(_finite(values))


def _id_of(folder: Path) -> str:
    """The id of the run, which the first start chooses."""
    file = folder / "id"
    if not file.exists():
        make_folder(folder)
        replace_file(file, secrets.token_hex(4).encode())
    return file.read_text()
