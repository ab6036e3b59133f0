"""Sinks: objects that take the records of a run, such as the metrics file or TensorBoard.

    choose_sinks(["tensorboard", "my_sinks:Lines"], key="report.sinks")

A word names one of jddp's, `package.module:Name` or an object is your own. A package that only a
sink needs is looked for here, before training, and imported in its thread. Whatever a sink does, it
neither stops nor slows the training:

    guarded = GuardedSink("wandb", make)
    guarded.begin(start)          # a thread makes the sink
    guarded.log(record)           # never waits
    guarded.close()               # waits for half a minute at most

TensorBoard, and Weights & Biases, show these charts:

    loss/train, loss/eval, accuracy/eval       the loss and each metric, training and evaluation
    optimizer/learning_rate, time/step_seconds and so on, by group
    recall/eval                                a metric that is an array: a table
    samples, ...                               text, images and histograms that callbacks log
"""

import contextlib
import copy
import importlib.util
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jddp.config.files import dump_values
from jddp.ground.errors import ConfigError
from jddp.ground.files import make_folder, replace_file
from jddp.ground.names import did_you_mean, name_of_callable, resolve_target
from jddp.ground.typing import Record, Settings
from jddp.trainer.reports.lines import array_lines

MOST_WAITING = 1000  # Number of records that wait; further ones are lost.
SECONDS_TO_CLOSE = 30.0  # Limit for taking the waiting records and closing.
PAGE_COLUMNS = 240  # Width of a page.
_GROUPS = {
    "optimizer": ("learning_rate", "grad_norm", "loss_scale", "skipped", "spike"),
    "time": ("epoch", "step_seconds", "data_wait_seconds", "host_seconds"),
    "speed": ("examples_per_second", "tokens_per_second", "model_flops_per_second", "mfu"),
    "memory": ("peak_memory_bytes", "predicted_memory_bytes"),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
log = logging.getLogger("jddp")


@runtime_checkable
class Sink(Protocol):
    """Takes the records of a run, on process 0."""

    def log(self, record: Record) -> None:
        """Takes a record.

        Args:
          record: Values by name: numbers, and lists (of lists) of numbers for metrics that are
            arrays; from `run.log` also text, and numpy arrays of float32, or of uint8 for images.
            "step" is the number of finished steps. "split" is "train" for the last step before the
            record, "eval" for an evaluation, or "callback".
        """

    def close(self) -> None:
        """Writes the rest; called once, after the last record, also if training has failed."""


class Start(NamedTuple):
    """A start of a run, the argument with which a sink is made.

    Attributes:
      run_dir: Run directory, or None.
      config: Config of the run; {} for a run of `fit`.
      step: Number of finished steps; 0 unless the run resumes.
    """

    run_dir: Path | None
    config: Settings
    step: int


# A word, a target, a sink, or a class or function that makes one.
GivenSink = str | Sink | Callable[[Start], Sink]


# The package that each word needs, and its sink.
WORDS: dict[str, tuple[str, Callable[[Start], Sink]]] = {
    "tensorboard": ("tensorboardX", lambda start: TensorBoard(*start)),
    "wandb": ("wandb", lambda start: WeightsAndBiases(*start)),
}


class ChosenSink(NamedTuple):
    """A sink that a run will make.

    Attributes:
      name: Word or target that names it, or the name of its class.
      make: Function that makes it.
    """

    name: str
    make: Callable[[Start], Sink]


def choose_sinks(given: object, *, key: str) -> list[ChosenSink]:
    """Returns the sinks that are named or given; imports the modules of targets.

    Args:
      given: A list of words, targets, sinks, and classes or functions that make one.
      key: The config key or argument that holds them, for errors.

    Raises:
      ConfigError: If a name is unknown, a package is not installed, or an object is no sink.
    """
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{key} is a list of sinks, such as ['tensorboard']; got {given!r}.")
    return [_choose(sink, f"{key}[{number}]") for number, sink in enumerate(given)]


def _choose(given: object, key: str) -> ChosenSink:
    if not isinstance(given, str):
        return _of_object(name_of_callable(given), given, key)
    if ":" in given:
        return _of_object(given, resolve_target(given, key=key), key)
    if given not in WORDS:
        known = f"Known: {', '.join(WORDS)}; your own is package.module:Name."
        raise ConfigError(f"{key}: no sink {given!r}.{did_you_mean(given, WORDS.keys())} {known}")
    package, make = WORDS[given]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key}: {given} needs {package}, which is not installed: pip install 'jddp[{given}]'."
        )
    return ChosenSink(given, make)


def _of_object(name: str, found: Any, key: str) -> ChosenSink:
    missing = [method for method in ("log", "close") if not callable(getattr(found, method, None))]
    is_class = isinstance(found, type)
    if missing and (is_class or not callable(found)):
        raise ConfigError(
            f"{key}: {name} has no method {missing[0]!r}. A sink has log(record) and close()."
        )
    return ChosenSink(name, found if is_class or missing else lambda _: found)


class GuardedSink:
    """A sink that passes records to another sink, in a thread.

    The other sink may fail, be slow, or hang, for example because its network is down. Its first
    failure is reported in one line, and at the end the number of records that it has lost.

    Args:
      name: Name of the other sink, for its failures.
      make: Function that makes it.
    """

    def __init__(self, name: str, make: Callable[[Start], Sink]) -> None:
        self._name, self._make = name, make
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None is the end
        self._num_given = self._num_taken = 0
        self._is_reported = False
        self._thread: threading.Thread | None = None

    def begin(self, start: Start) -> None:
        """Begins to make the sink, and to pass records to it."""
        self._thread = threading.Thread(target=self._take_records, args=(start,), daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Passes a record on, unless too many wait already."""
        self._num_given += 1
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(record)
        else:
            self._report(f"takes no record, and {MOST_WAITING:,} wait")

    def close(self) -> None:
        """Waits for the sink to close, for a limited time; reports the records that are lost."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(SECONDS_TO_CLOSE)
        if self._thread.is_alive():
            self._report(f"has not closed within {SECONDS_TO_CLOSE:g} s")
        if num_lost := self._num_given - self._num_taken:
            log.warning("sink %s: %d of %d records lost", self._name, num_lost, self._num_given)

    def _take_records(self, start: Start) -> None:
        with self._reporting("begin"):
            sink = self._make(start)
            while (record := self._waiting.get()) is not None:
                with self._reporting(f"take the record of step {record['step']}"):
                    sink.log(copy.deepcopy(record))  # The sink may change it.
                    self._num_taken += 1
            with self._reporting("close"):
                sink.close()

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # An exit, too: it would end the thread in silence.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._report(f"cannot {what}: {reason.rstrip('.')}")

    def _report(self, what: str) -> None:
        """Reports the first failure."""
        if not self._is_reported:
            self._is_reported = True
            log.warning("sink %s %s. The training continues.", self._name, what)


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
      run_dir: Run directory.
      config: Config of the run.
      step: Number of finished steps.
    """

    def __init__(self, run_dir: Path | None, config: Settings, step: int) -> None:
        from tensorboardX import SummaryWriter  # The import changes loggers and warnings.

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
                text = _as_typed(array_lines(value, PAGE_COLUMNS))
                self._writer.add_text(chart, text, step)
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
      run_dir: Run directory.
      config: Config of the run.
      step: Number of finished steps.

    Raises:
      ConfigError: If there are no credentials.
    """

    def __init__(self, run_dir: Path | None, config: Settings, step: int) -> None:
        import wandb

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
