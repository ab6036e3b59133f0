"""A run in progress or finished, its progress, its callbacks and its options.

run = jddp.fit(ddp, batches, num_steps=1000, evaluate=test_batches)
run.plot(); run.history; run.evaluate(other_batches); run.predict(batches)
run = jddp.open_run(run_dir)  # the same for a run that has ended

`Progress` is one value, which the loop holds and a checkpoint keeps with the state. A field that
resuming needs is added there, and nowhere else. `Options` is what a run is asked: `fit`, a config
and a run that resumes make the same.

Loss and metrics are equal on every process. So a callback makes the same decision on all processes,
and no process waits for another one forever.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from jddp.checkpoint.folders import finished
from jddp.config.versions import commit_of, versions
from jddp.data import eval_batches
from jddp.data.periods import Epochs, OptimizerSteps, Period, Reached
from jddp.distributed.requests import Request
from jddp.distributed.watchdog import Limits
from jddp.engine.compiled import Trainable
from jddp.engine.evaluation import check_batches
from jddp.engine.state import TrainState
from jddp.ground.errors import ConfigError, UsageError, check_choice
from jddp.ground.names import tool
from jddp.ground.typing import Batches, JsonObject, LossFn, Metrics, PyTree, Record, Settings, Shown
from jddp.modules.base import outputs
from jddp.trainer.reports.files import as_json, from_plain, to_plain
from jddp.trainer.reports.lines import is_metric
from jddp.trainer.reports.run_directory import OWN_NAMES
from jddp.trainer.reports.sinks import ChosenSink

log = logging.getLogger("jddp")


Every = int | Epochs | str | None  # A period: steps, epochs, or CONTINUOUS.
CONTINUOUS = "continuous"  # A save begins when the last one has ended.
EVAL_BATCH_SIZE = 1024  # Default number of examples in a batch of a dict of arrays.
_NAME = re.compile(r"\w[\w-]*", re.ASCII)


Losses = tuple[tuple[int, float], ...]  # The last losses, each with its step.


class Skips(NamedTuple):
    """Steps that were skipped.

    Attributes:
      total: Number of skipped steps.
      in_a_row: Number of skipped steps since the last one that was taken, not counting steps that
        only lower the loss scale.
      loss_scale: Loss scale of the last step, if it was skipped; else None.
    """

    total: int = 0
    in_a_row: int = 0
    loss_scale: float | None = None


NO_SKIPS = Skips()
BEGUN = Reached(0)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come, and the facts that a resumed run compares.

    A default is the value for a checkpoint of an earlier version, which has no such field.

    Attributes:
      step: Number of finished optimizer steps.
      position: Position in the data after the last step.
      before: How far the run had come before the last step.
      metrics: The last train record.
      evaluations: Records of evaluations; a checkpoint keeps only the last one, since the file of
        metrics has the others.
      stopped: Reason that a callback gave for ending the run, or None.
      skipped: The steps that were skipped.
      losses: The last losses, by which spikes are judged.
      best: Steps of the best checkpoints, the best first.
      world: Processes, devices and options by which a step divides rows.
      program: Digests of model, loss and optimizer.
      config: Settings of the run; None where there are none.
      manifest: Versions of the software, and facts.
      plan: Settings that may differ when the run resumes.
    """

    step: int = 0
    position: JsonObject = dataclasses.field(default_factory=dict)
    before: Reached = BEGUN
    metrics: Metrics = dataclasses.field(default_factory=dict)
    evaluations: list[JsonObject] = dataclasses.field(default_factory=list)
    stopped: str | None = None
    skipped: Skips = NO_SKIPS
    losses: Losses = ()
    best: list[int] = dataclasses.field(default_factory=list)
    world: Settings = dataclasses.field(default_factory=dict)
    program: JsonObject | None = None
    config: JsonObject | None = None
    manifest: JsonObject = dataclasses.field(default_factory=dict)
    plan: JsonObject = dataclasses.field(default_factory=dict)

    def to_json(self) -> JsonObject:
        """Values of JSON, without the step, which a checkpoint has anyway.

        Raises:
          ConfigError: If the position holds values that would not come back equal.
        """
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        del fields["step"]
        fields["position"] = to_plain(self.position, "The position of the training batches")
        for name in ("metrics", "evaluations"):
            fields[name] = as_json(fields[name])
        return fields

    @classmethod
    def from_json(cls, step: int, beside: JsonObject) -> "Progress":
        """The progress of a checkpoint, which an earlier version may have written.

        Raises:
          LookupError, TypeError or ValueError: If this cannot be its run data.
        """
        names = {x.name for x in dataclasses.fields(cls)}
        fields = {name: x for name, x in beside.items() if name in names}
        fields["position"] = from_plain(beside["position"])
        fields["before"] = Reached(*beside.get("before", [step - 1]))
        total, in_a_row, *scale = beside["skipped"]
        fields["skipped"] = Skips(int(total), int(in_a_row), *scale)
        fields["losses"] = tuple((int(at), loss) for at, loss in beside.get("losses", []))
        return cls(**fields | {"step": step})


class Run(Shown):
    """A run in progress or finished: the object that callbacks get and `fit` returns.

    Attributes:
      state: The most recent state.
      run_dir: Folder of the run's files, or None.
      config: The config of the run as nested dicts, of which `jddp.Config(**run.config)` makes the
        object; None for a run of `fit`.
      interrupted: Name of the signal that stopped the run before its end, or None. Such a run is
        saved, and resumes when it is started again.
    """

    def __init__(
        self,
        ddp: Trainable,
        state: TrainState,
        *,
        run_dir: Path | None = None,
        evaluation: Batches | None = None,
        eval_params: str = "params",
        config: JsonObject | None = None,
    ) -> None:
        self.state = state
        self.progress = Progress()
        self.records: list[JsonObject] = []  # Records since the run began or resumed.
        self.read_earlier: Callable[[], list[JsonObject]] | None = None  # Used by `history`.
        self.lost: set[int] = set()  # steps of evaluations before a resume that no checkpoint has
        self.run_dir = run_dir
        self.config = config
        self.interrupted: str | None = None
        self._ddp = ddp
        # The loop of a run in progress: its requests, its sinks, its terminal.
        self.ask: Callable[[Request], None] | None = None
        self.give: Callable[[JsonObject], None] = lambda record: None
        self.show: Callable[[str], None] = lambda text: None
        self._evaluation = evaluation
        self._eval_params = eval_params

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""
        return self.progress.step

    @property
    def metrics(self) -> Metrics:
        """The last train record, a dict of floats."""
        return self.progress.metrics

    @property
    def evaluations(self) -> list[JsonObject]:
        """The records of all evaluations, including the ones before a resume."""
        return self.progress.evaluations

    @property
    def stopped(self) -> str | None:
        """Reason that a callback gave for ending the run, or None."""
        return self.progress.stopped

    @property
    def history(self) -> list[JsonObject]:
        """The records of training and evaluation, in order, as in `metrics.jsonl`.

        With a run directory they include the records before a resume.
        """
        # Read only here: a run of weeks leaves millions of records, and resumes without them.
        if self.read_earlier is not None:
            self.records[:0] = self.read_earlier()
            self.read_earlier = None
        return self.records

    @property
    def checkpoints(self) -> list[str]:
        """The checkpoints on disk by folder and step, such as "best/400"; the newest are last."""
        paths = [] if self.run_dir is None else sorted(self.run_dir.iterdir())
        folders = [path for path in paths if path.is_dir()]
        return [f"{folder.name}/{step}" for folder in folders for step in finished(folder)]

    @property
    def model(self) -> Any:
        """A copy of the most recent model, a bound Linen module or an NNX module in eval mode.

        It has the parameters that `evaluate` uses.
        """
        found = self._ddp.model(self.state, self._eval_params)
        return self._ddp.steps.spec.model.bound(found)

    @property
    def eval_metrics(self) -> JsonObject:
        """The record of the last evaluation; empty before the first."""
        return self.evaluations[-1] if self.evaluations else {}

    def stop(self, reason: str) -> None:
        """Ends the run after the current step; `reason` is reported.

        In a job of several processes one or all may call it. They stop after the same step, which
        is the current one if all call it there. `run.stopped` is set then.
        """
        if self.ask is None:
            self.progress = dataclasses.replace(self.progress, stopped=self.stopped or reason)
        else:
            self.ask(Request("stop", reason))

    def log(self, values: Mapping[str, object]) -> None:
        """Gives values to the sinks of a run in progress, such as samples of a model's output.

        Args:
          values: Values by name: numbers and text, which `metrics.jsonl` has too; arrays of floats,
            which TensorBoard and Weights & Biases show as histograms; images, which are uint8:
            `(h, w)`, `(h, w, 3)` or `(n, h, w, 3)`.
        """
        taken = {name: _taken(value) for name, value in values.items()}
        self.give({"step": self.step, "split": "callback", **taken})

    def note(self, text: str) -> None:
        """Prints a sentence above the progress of a run in progress, on process 0, and logs it."""
        self.show(text)

    def save(self, where: str = "checkpoints") -> None:
        """Writes a checkpoint of the most recent state into a folder of the run directory.

        In a job of several processes one or all may call it. The checkpoint is written after the
        callback, at a step that all processes have in common: the current one if all call it there.

        Raises:
          ConfigError: If `where` is not a plain name, or is the name of a file of the run itself.
          UsageError: If the run was opened.
        """
        if self.ask is None:
            raise UsageError("An opened run is read-only: call fit with its run_dir to resume it.")
        if not _NAME.fullmatch(where) or where.lower() in OWN_NAMES:  # Some disks ignore case.
            raise ConfigError(
                f"run.save({where!r}): not a plain name for a folder of the run directory, or the "
                "name of its own files. Use letters, digits, '_' and '-', as in 'kept'."
            )
        self.ask(Request("save", where))

    def evaluate(self, batches: Batches | None = None) -> Metrics:
        """Evaluates the most recent state, as `jddp.DataParallel.evaluate` does.

        Args:
          batches: This process's batches, or a dict of arrays, the same on every process; by
            default the evaluation batches of the run.
        """
        return dict(self._ddp.evaluate(self.state, self._given(batches), self._eval_params))

    @property
    def test_batches(self) -> Batches:
        """The evaluation batches of the run."""
        return self._given(None)

    def predict(self, batches: Batches | None = None, function: LossFn = outputs) -> PyTree:
        """The outputs of the most recent model for each row, as `jddp.DataParallel.predict` does.

        Args:
          batches: This process's batches, or a dict of arrays, the same on every process; by
            default the evaluation batches of the run.
          function: Function of (model, batch) that returns an array with a row for each.
        """
        return self._ddp.predict(self.state, self._given(batches), function, self._eval_params)

    def _given(self, batches: Batches | None) -> Batches:
        given = self._evaluation if batches is None else batches
        if given is None:
            raise UsageError("The run has no evaluation batches (evaluate=): pass batches.")
        if isinstance(given, Mapping):
            return eval_batches(given, global_batch_size=EVAL_BATCH_SIZE)
        return given

    def plot(self) -> Any:
        """Draws loss and metrics over the steps; returns the matplotlib figure.

        Raises:
          UsageError: If matplotlib, or `jddp.workbench`, is not installed.
        """
        return tool("plot", "run.plot()")(self.history)

    def __repr__(self) -> str:
        """The step, the end, the newest metrics and the directory, one line each."""
        ends = {"stopped:": self.stopped, "interrupted by": self.interrupted}
        lines = [f"{name} {text}" for name, text in ends.items() if text is not None]
        for split, record in (("train", self.metrics), ("eval", self.eval_metrics)):
            if shown := _shown(record):
                lines.append(f"{split:<6} {shown}")
        lines.append(f"in {self.run_dir or 'no directory'}")
        return "\n  ".join([f"Run at step {self.step:,}", *lines])


def _shown(record: Record) -> str:
    """The numbers of a record, then the shapes of its arrays."""
    numbers = [f"{name} {x:.4g}" for name, x in record.items() if is_metric(name, x)]
    arrays = {name: np.shape(x) for name, x in record.items() if isinstance(x, list)}
    shapes = [f"{name} {' x '.join(map(str, shape))}" for name, shape in arrays.items()]
    return ", ".join(numbers + shapes)


def _taken(value: object) -> object:
    """A number or text, or a copy of an array as a NumPy array, in float32 or uint8."""
    if isinstance(value, str):
        return value
    array = np.array(value)  # A sink reads it later; the caller may change the original.
    if array.ndim == 0:
        return array.item()
    return array if array.dtype == np.uint8 else array.astype(np.float32)


class Callback:
    """Base class of callbacks; override the methods you need. Every process calls all of them.

    Only `on_exception` may be called by some processes alone.
    """

    def on_begin(self, run: Run) -> None:
        """Called once, before the first step or evaluation; a resumed run is restored by then."""

    def on_step(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each optimizer step, `metrics["step"]`; `run.state` may be one ahead."""

    def on_epoch(self, run: Run, number: int) -> None:
        """Called after `on_step` of the step that takes the last example of an epoch.

        An epoch may end inside a batch, whose other rows belong to the next one. Only batches of
        `jddp.data.TrainBatches` know their epochs; with others it is not called. A run that goes
        back at a loss spike may end an epoch again.

        Args:
          run: The run, which may be one step ahead.
          number: Number of epochs since the beginning of the run, including epochs before a resume.
        """

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation of `run.state`."""

    def on_save(self, run: Run) -> None:
        """Called when a checkpoint save has started; it completes in the background."""

    def on_end(self, run: Run) -> None:
        """Called once, after the last step, evaluation and checkpoint."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called where an exception ends the run, after a checkpoint was saved, if one could be.

        The exception is raised afterwards; an exception in this method is logged. Only processes
        that fail call it: do not communicate here. A signal is no exception.
        """


def call_each(callbacks: Sequence[Callback], hook: Callable[[Callback], None]) -> None:
    """Calls a hook of every callback, even after one has raised.

    So no callback misses a call because of another one. In a job all processes call the same hooks,
    and none waits for a save that another process has left out.

    Raises:
      BaseException: The first exception of a hook; later ones are logged.
    """
    errors = list[BaseException]()
    for callback in callbacks:
        try:
            hook(callback)
        except KeyboardInterrupt:  # Ctrl-C exits at once.
            raise
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        log.error("A callback has failed after another one: %r", later, exc_info=later)
    if errors:
        raise errors[0]


def check_counts(**counts: int | str | None) -> None:
    """Refuses counts that are not positive whole numbers; accepts None.

    Raises:
      ConfigError: If one is not, with its name.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool | str) or not hasattr(value, "__index__"):
            raise ConfigError(f"{name} is a whole number; got {value!r}.")
        if value < 1:
            raise ConfigError(f"{name} is at least 1; got {value}.")


def as_period(every: Every) -> Period | None:
    """The period of an argument, which is a number of steps, or epochs; or None.

    A run that saves continuously has no period: see `Saving.due`.
    """
    if isinstance(every, str | None):
        return None
    return every if isinstance(every, Epochs) else OptimizerSteps(every)


@dataclasses.dataclass(frozen=True)
class Keep:
    """The checkpoints of a run that stay.

    Attributes:
      newest: Number of newest checkpoints.
      every_steps: Interval in steps; checkpoints at its multiples stay too.
      memory_every_steps: Steps between states that the hosts keep in memory for a restart; None for
        as often as this takes one per cent of the time, and 0 for none.

    Raises:
      ConfigError: If a number is not positive.
    """

    newest: int = 3
    every_steps: int | None = None
    memory_every_steps: int | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive."""
        check_counts(keep=self.newest, keep_every_steps=self.every_steps)
        check_counts(memory_every_steps=self.memory_every_steps or None)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluations of a run.

    Attributes:
      batches: This process's batches, iterated from the beginning each time; or a dict of arrays,
        the same on every process; or None.
      params: Parameters to evaluate, "params" or "ema".
      limit: Number of batches that an evaluation reads; None reads all. Batches of examples
        hold rows spread evenly over all, the same ones each time; other iterables give their first
        batches. Means are exact over the rows that were read; "examples" counts them.

    Raises:
      ConfigError: If the parameters are unknown, or the limit is not positive.
    """

    batches: Batches | Mapping[str, object] | None
    params: str = "params"
    limit: int | None = None

    def __post_init__(self) -> None:
        """Refuses unknown parameters, and a limit that is not positive."""
        check_choice("eval_params", self.params, ("params", "ema"))
        check_counts(limit=self.limit)


@dataclasses.dataclass(frozen=True)
class Checks:
    """The checks that a run makes of its processes and steps.

    Attributes:
      replicas_every_steps: Steps between comparisons of all replicas; None for no comparison.
      max_consecutive_skips: Number of steps in a row, skipped by `skip_nonfinite`, that ends the
        run.
      on_spike: Action where a loss is far above the losses before it, by the rule of
        `jddp.trainer.numerics`: "warn" prints a line, "skip" also leaves out the update of the
        step; None looks for nothing.
      same_batches: Whether all processes get the same rows on purpose, as in a benchmark.
        If False, a first batch that several processes have is refused. With
        `jddp.data.TrainBatches` and `eval_batches` each process reads its own rows.
      limits: Seconds that a phase may take before its processes are reported as hanging.
      replay_every_steps: Steps between replayed steps, whose gradients are computed on two devices
        and compared before the update; None for none.

    Raises:
      ConfigError: If a number is not positive, or the action is unknown.
    """

    replicas_every_steps: int | None = 500
    max_consecutive_skips: int = 10
    on_spike: str | None = "warn"
    same_batches: bool = False
    limits: Limits = dataclasses.field(default_factory=Limits)
    replay_every_steps: int | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive, and an unknown action."""
        check_choice("on_spike", self.on_spike, ("warn", "skip", None))
        check_counts(
            check_replicas_every_steps=self.replicas_every_steps,
            replay_every_steps=self.replay_every_steps,
            max_consecutive_skips=self.max_consecutive_skips,
        )


CHECKS = Checks()


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; a period of None means once, at the end.

    Attributes:
      num_steps: Total number of optimizer steps, including steps before a resume; None for the
        steps of `num_epochs`, which are counted where the run begins or resumes.
      num_epochs: Number of passes over the data, or None. Epochs end with their last example.
      log_every_steps: Steps between train records, or epochs.
      eval_every_steps: Steps between evaluations, or epochs.
      save_every_steps: Steps between checkpoints, or epochs; or "continuous".
      keep: The checkpoints that stay.
      resume: "auto", "never", "must" or "changed".
      evaluation: Evaluation batches, iterated again each time.
      learning_rate: Learning rate as a function of the step, for the records, or None.
      checks: Checks of the run's processes and steps.
      profile_steps: First and last step of the recorded trace, or None.
      seed: Seed of the first state.
      run_dir: Folder for metrics and checkpoints, or its URL; None keeps nothing.
      config: Settings of the run; a directory with other ones is refused.
      facts: Facts to keep with the settings.
      callbacks: Objects as `jddp.Callback` describes them.
      sinks: Sinks of the user, which get the records too.

    Raises:
      ConfigError: If a number is not positive, or a choice is unknown.
    """

    num_steps: int | None
    num_epochs: float | None = None
    log_every_steps: int | Epochs = 50
    eval_every_steps: Every = None
    save_every_steps: Every = None
    keep: Keep = Keep()
    resume: str = "auto"
    evaluation: Evaluation = Evaluation(None)
    learning_rate: Callable[[int], ArrayLike] | None = None
    checks: Checks = CHECKS
    profile_steps: Sequence[int] | None = None
    seed: int = 0
    run_dir: str | Path | None = None
    config: JsonObject | None = None
    facts: Settings = dataclasses.field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    sinks: Sequence[ChosenSink] = ()

    def __post_init__(self) -> None:
        """Refuses wrong settings, before anything is compiled or written."""
        steps = {name: x for name, x in self.periods.items() if not isinstance(x, Epochs)}
        if self.save_every_steps == CONTINUOUS:
            del steps["save_every_steps"]
        check_counts(num_steps=self.num_steps, **steps)
        check_choice("resume", self.resume, ("auto", "never", "must", "changed"))
        batches = self.evaluation.batches
        check_batches(() if batches is None else batches, "evaluate= takes")
        if self.eval_every_steps is not None and isinstance(batches, Iterator):
            raise ConfigError("evaluate= is an iterator, read only once. Give a list of batches.")
        if self.resume == "must" and self.run_dir is None:
            raise ConfigError("resume='must' needs run_dir=, where the run was saved.")
        if self.profile_steps is not None and self.run_dir is None:
            raise ConfigError("train.profile_steps needs run.dir, where the trace is written.")
        boards = [sink.name for sink in self.sinks if sink.needs_folder]
        if self.run_dir is None and boards:
            raise ConfigError(f"The sink {boards[0]} needs run_dir= (run.dir), where it writes.")

    @property
    def periods(self) -> dict[str, Every]:
        """The periods of the run's actions, by name."""
        names = ("log_every_steps", "eval_every_steps", "save_every_steps")
        return {name: getattr(self, name) for name in names}

    @property
    def manifest(self) -> JsonObject:
        """The facts, the versions of the software, and the commit of the code around it."""
        commit = commit_of(Path())
        return {"versions": versions(), **({"commit": commit} if commit else {}), **self.facts}

    @property
    def settings(self) -> JsonObject:
        """The settings that may differ when a run resumes, and the ones of evaluation, by name."""
        periods = {
            name: f"{x.number:g} epochs" if isinstance(x, Epochs) else x
            for name, x in self.periods.items()
        }
        return {"num_steps": self.num_steps, **periods} | {
            "keep": self.keep.newest,
            "keep_every_steps": self.keep.every_steps,
            "memory_every_steps": self.keep.memory_every_steps,
            "check_replicas_every_steps": self.checks.replicas_every_steps,
            "replay_every_steps": self.checks.replay_every_steps,
            "max_consecutive_skips": self.checks.max_consecutive_skips,
            "on_spike": self.checks.on_spike,
            "eval_params": self.evaluation.params,
            "limit_eval_batches": self.evaluation.limit,
        }

    @property
    def common(self) -> JsonObject:
        """The settings that all processes of a job must have in common, by name.

        Batches and functions have no text that is the same.
        """
        return self.settings | {
            "num_epochs": self.num_epochs,
            "resume": self.resume,
            "seed": self.seed,
            "same_batches": self.checks.same_batches,
        }
