"""The settings of a run: its length, its periods, its checkpoints, evaluations and checks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax.typing import ArrayLike

from jddp.config.versions import commit_of, versions
from jddp.data.periods import Epochs, OptimizerSteps, Period
from jddp.distributed.watchdog import Limits
from jddp.engine.evaluation import check_batches
from jddp.errors import ConfigError, check_choice
from jddp.trainer.callbacks import Callback
from jddp.trainer.reports.sinks import ChosenSink
from jddp.typing import Batches, JsonObject, Settings


def check_counts(**counts: int | None) -> None:
    """Refuses counts that are no positive whole numbers; None is none.

    Raises:
      ConfigError: If one is not, with its name.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ConfigError(f"{name} is a whole number; got {value!r}.")
        if value < 1:
            raise ConfigError(f"{name} is at least 1; got {value}.")


def as_period(name: str, given: int | Epochs | None) -> Period | None:
    """The period of an argument, which is a number of steps, or epochs; or None.

    Raises:
      ConfigError: If a number of steps is not positive, with the argument's name.
    """
    if given is None or isinstance(given, Epochs):
        return given
    check_counts(**{name: given})
    return OptimizerSteps(given)


@dataclass(frozen=True)
class Keep:
    """The checkpoints of a run that stay.

    Attributes:
      newest: Number of newest checkpoints.
      every_steps: Interval in steps; checkpoints at its multiples stay too.

    Raises:
      ConfigError: If a number is not positive.
    """

    newest: int = 3
    every_steps: int | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive."""
        check_counts(keep=self.newest, keep_every_steps=self.every_steps)


@dataclass(frozen=True)
class Evaluation:
    """Evaluations of a run.

    Attributes:
      batches: This process's batches, iterated from the beginning each time; or a dict of arrays,
        the same on every process; or None.
      params: Parameters to evaluate, "params" or "ema".
      limit: Number of batches that an evaluation reads; None reads all. Of examples they hold rows
        that are spread evenly over all, the same ones each time; of other iterables they are the
        first ones. Means are exact over the rows that were read, which "examples" counts.

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


@dataclass(frozen=True)
class Checks:
    """What a run checks of its processes and steps.

    Attributes:
      replicas_every_steps: Steps between comparisons of all replicas; None for no comparison.
      max_consecutive_skips: Number of steps in a row, skipped by `skip_nonfinite`, that ends the
        run.
      on_spike: Action where a loss is far above the losses before it, by the rule of
        `jddp.trainer.spikes`: "warn" prints a line, "skip" also leaves out the update of the step;
        None looks for nothing.
      same_batches: Whether all processes get the same rows on purpose, as in a benchmark.
        Otherwise a first batch that several processes have is refused. With
        `jddp.data.TrainBatches` and `eval_batches` each process reads its own rows.
      evaluation: Whether a new run evaluates one batch before its first step, without a record, so
        that what fails only where it runs, such as memory, fails then. Evaluation is traced anyway.
      limits: Seconds that a phase may take before its processes are reported as hanging.

    Raises:
      ConfigError: If a number is not positive, or the action is unknown.
    """

    replicas_every_steps: int | None = 500
    max_consecutive_skips: int = 10
    on_spike: str | None = "warn"
    same_batches: bool = False
    evaluation: bool = True
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive, and an unknown action."""
        check_choice("on_spike", self.on_spike, ("warn", "skip", None))
        check_counts(
            check_replicas_every_steps=self.replicas_every_steps,
            max_consecutive_skips=self.max_consecutive_skips,
        )


KEEP = Keep()
LOG_EVERY = OptimizerSteps(50)
CHECKS = Checks()


@dataclass
class Plan:
    """The settings of a run; a period of None means once, at the end.

    Attributes:
      num_steps: Total number of optimizer steps, including steps before a resume. With a number of
        epochs it is counted again when the run resumes: epochs end with their last example.
      num_epochs: Number of passes over the data, or None.
      log_every: Period of train records.
      eval_every: Period of evaluations.
      save_every: Period of checkpoints.
      keep: The checkpoints that stay.
      resume: "auto", "never", "must" or "changed".
      evaluation: Evaluation batches, iterated again each time, or None.
      eval_params: "params" or "ema".
      limit_eval_batches: Number of batches that an evaluation reads, or None for all.
      learning_rate: Learning rate as a function of the step, for the records, or None.
      checks: What the run checks of its processes and steps.
      profile_steps: First and last step of which a trace is recorded, or None.
      seed: Seed of the first state.
      run_dir: Folder for metrics and checkpoints, or its URL; None keeps nothing.
      config: Settings of the run; a directory with other ones is refused.
      facts: Facts to keep beside the settings.
      callbacks: Objects as `jddp.Callback` describes them.
      sinks: Sinks of the user, which get the records too.
      norms_every_steps: Steps between records of each layer's norms, or None.

    Raises:
      ConfigError: If a number is not positive, or a choice is unknown.
    """

    num_steps: int
    num_epochs: float | None = None
    log_every: Period = LOG_EVERY
    eval_every: Period | None = None
    save_every: Period | None = None
    keep: Keep = KEEP
    resume: str = "auto"
    evaluation: Batches | None = None
    eval_params: str = "params"
    limit_eval_batches: int | None = None
    learning_rate: Callable[[int], ArrayLike] | None = None
    checks: Checks = CHECKS
    profile_steps: Sequence[int] | None = None
    seed: int = 0
    run_dir: str | Path | None = None
    config: Settings | None = None
    facts: Settings = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    sinks: Sequence[ChosenSink] = ()
    norms_every_steps: int | None = None

    @property
    def manifest(self) -> JsonObject:
        """The facts, the versions of the software, and the commit of the code around it."""
        commit = commit_of(Path())
        return {"versions": versions(), **({"commit": commit} if commit else {}), **self.facts}

    @property
    def settings(self) -> JsonObject:
        """The settings that may differ when a run resumes, and those of evaluation, by name."""
        return {
            "num_steps": self.num_steps,
            **_in_both_units("log", self.log_every),
            **_in_both_units("eval", self.eval_every),
            **_in_both_units("save", self.save_every),
            "keep": self.keep.newest,
            "keep_every_steps": self.keep.every_steps,
            "check_replicas_every_steps": self.checks.replicas_every_steps,
            "max_consecutive_skips": self.checks.max_consecutive_skips,
            "on_spike": self.checks.on_spike,
            "eval_params": self.eval_params,
            "limit_eval_batches": self.limit_eval_batches,
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
            "check_evaluation": self.checks.evaluation,
        }

    def __post_init__(self) -> None:
        """Refuses wrong settings, before anything is compiled or written."""
        check_counts(num_steps=self.num_steps, limit_eval_batches=self.limit_eval_batches)
        check_choice("resume", self.resume, ("auto", "never", "must", "changed"))
        check_batches(() if self.evaluation is None else self.evaluation, "evaluate= takes")
        if self.eval_every is not None and isinstance(self.evaluation, Iterator):
            raise ConfigError("evaluate= is an iterator, read only once. Give a list of batches.")
        if self.profile_steps is not None and self.run_dir is None:
            raise ConfigError("train.profile_steps needs run.dir, where the trace is written.")
        if self.run_dir is None:
            for sink in self.sinks:
                sink.refuse_no_run_dir()


def _in_both_units(what: str, period: Period | None) -> JsonObject:
    """A period by its name in steps and its name in epochs, at least one of which is None."""
    found: JsonObject = {f"{what}_every_steps": None, f"{what}_every_epochs": None}
    if period is not None:
        found[f"{what}_every_{period.unit}"] = period.number
    return found
