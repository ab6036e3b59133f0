"""The options of a run: its length, its periods, its checkpoints, evaluations and checks.

`fit`, a config and a run that resumes make the same `Options`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax.typing import ArrayLike

from jddp.config.versions import commit_of, versions
from jddp.data.periods import Epochs, OptimizerSteps, Period
from jddp.distributed.watchdog import Limits
from jddp.engine.evaluation import check_batches
from jddp.ground.errors import ConfigError, check_choice
from jddp.ground.typing import Batches, JsonObject, Settings
from jddp.trainer.reports.sinks import WORDS, ChosenSink
from jddp.trainer.run import Callback


def check_counts(**counts: int | None) -> None:
    """Refuses counts that are not positive whole numbers; accepts None.

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


def as_period(every: int | Epochs | None) -> Period | None:
    """The period of an argument, which is a number of steps, or epochs; or None."""
    return every if every is None or isinstance(every, Epochs) else OptimizerSteps(every)


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


@dataclass(frozen=True)
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

    Raises:
      ConfigError: If a number is not positive, or the action is unknown.
    """

    replicas_every_steps: int | None = 500
    max_consecutive_skips: int = 10
    on_spike: str | None = "warn"
    same_batches: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive, and an unknown action."""
        check_choice("on_spike", self.on_spike, ("warn", "skip", None))
        check_counts(
            check_replicas_every_steps=self.replicas_every_steps,
            max_consecutive_skips=self.max_consecutive_skips,
        )


CHECKS = Checks()


@dataclass(frozen=True)
class Options:
    """The options of a run; a period of None means once, at the end.

    Attributes:
      num_steps: Total number of optimizer steps, including steps before a resume; None for the
        steps of `num_epochs`, which are counted where the run begins or resumes.
      num_epochs: Number of passes over the data, or None. Epochs end with their last example.
      log_every_steps: Steps between train records, or epochs.
      eval_every_steps: Steps between evaluations, or epochs.
      save_every_steps: Steps between checkpoints, or epochs.
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
    eval_every_steps: int | Epochs | None = None
    save_every_steps: int | Epochs | None = None
    keep: Keep = Keep()
    resume: str = "auto"
    evaluation: Evaluation = Evaluation(None)
    learning_rate: Callable[[int], ArrayLike] | None = None
    checks: Checks = CHECKS
    profile_steps: Sequence[int] | None = None
    seed: int = 0
    run_dir: str | Path | None = None
    config: JsonObject | None = None
    facts: Settings = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    sinks: Sequence[ChosenSink] = ()

    def __post_init__(self) -> None:
        """Refuses wrong settings, before anything is compiled or written."""
        steps = {name: x for name, x in self.periods.items() if not isinstance(x, Epochs)}
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
        boards = [sink.name for sink in self.sinks if sink.name in WORDS]
        if self.run_dir is None and boards:
            raise ConfigError(f"The sink {boards[0]} needs run_dir= (run.dir), where it writes.")

    @property
    def periods(self) -> dict[str, int | Epochs | None]:
        """The periods of the run's actions, by name."""
        names = ("log_every_steps", "eval_every_steps", "save_every_steps")
        return {name: getattr(self, name) for name in names}

    @property
    def log_every(self) -> Period:
        """Period of train records."""
        return as_period(self.log_every_steps) or OptimizerSteps(50)

    @property
    def eval_every(self) -> Period | None:
        """Period of evaluations."""
        return as_period(self.eval_every_steps)

    @property
    def save_every(self) -> Period | None:
        """Period of checkpoints."""
        return as_period(self.save_every_steps)

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
            "check_replicas_every_steps": self.checks.replicas_every_steps,
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
