"""The sections of a config: every key with its type, range, default, meaning and effect.

    Config(train={"num_steps": 100}, model={"name": "mlp"}).optimizer.learning_rate

Sections hold names and numbers; which models, data sets and optimizers exist is checked in their
packages. `options` has the sections that are options of `DataParallel`, too.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator

from jddp.config.keys import ConfigMistakes, describe_mistakes, keys_of
from jddp.config.options import DdpConfig, NamedSection, Section, WithArguments, option
from jddp.ground.errors import ConfigError
from jddp.ground.files import expand, is_url
from jddp.ground.names import direction_of


def _expanded(path: str) -> str:
    try:
        expanded = str(expand(path))
        return expanded if path.startswith("~") else path
    except ConfigError as error:
        raise ValueError(str(error).rstrip(".")) from None


def _refuse_both(section: Section, one: str, other: str) -> None:
    """Refuses a section that has two keys which exclude each other."""
    if None not in (getattr(section, one), getattr(section, other)):
        raise ValueError(f"{one!r} and {other!r} exclude each other: set one of them to null")


Step = Annotated[int, Field(ge=1)]
FirstAndLast = Annotated[list[Step], Field(min_length=2, max_length=2)]
ExpandedPath = Annotated[str, AfterValidator(_expanded)]
PathOrURL = Annotated[str, AfterValidator(lambda path: path if is_url(path) else _expanded(path))]


class RunConfig(Section):
    """The run directory."""

    dir: PathOrURL | None = option(
        None, "Run directory, or its URL (s3://...); runs/<config name> unless given.", "none"
    )


class TrainConfig(Section):
    """The length of training, and the intervals of reports."""

    num_steps: int | None = option(None, "Optimizer steps in all; or num_epochs.", "result", ge=1)
    num_epochs: float | None = option(None, "Passes over the data; or num_steps.", "result", gt=0)
    eval_every_steps: int | None = option(
        None, "Steps between evaluations; the end is always evaluated.", "result", ge=1
    )
    eval_every_epochs: float | None = option(
        None, "Epochs between evaluations, such as 1 or 0.5; or eval_every_steps.", "result", gt=0
    )
    eval_params: Literal["params", "ema"] = option(
        "params", "Evaluate the parameters, or their moving average."
    )
    limit_eval_batches: int | None = option(
        None, "Batches of an evaluation, of rows spread over all; null evaluates all.", ge=1
    )
    log_every_steps: int = option(50, "Steps between lines of metrics.", "none", ge=1)
    check_replicas_every_steps: int | None = option(
        500, "Steps between bitwise comparisons of all replicas; or null.", "none", ge=1
    )
    replay_every_steps: int | None = option(
        None, "Steps between steps that two devices compute, bitwise compared.", "rounding", ge=1
    )
    max_consecutive_skips: int = option(
        10, "Steps skipped in a row (ddp.skip_nonfinite) that end the run.", "none", ge=1
    )
    on_spike: Literal["warn", "skip"] | None = option(
        "warn",
        "If the loss jumps: print a line, or leave out the update; or null.",
        alike=("warn", None),
    )
    profile_steps: FirstAndLast | None = option(
        None, "First and last step of which a trace is kept, as [10,13]; or null.", "none"
    )

    @model_validator(mode="after")
    def _one_length_and_one_unit(self) -> "TrainConfig":
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError("give either 'num_steps' or 'num_epochs'")
        _refuse_both(self, "eval_every_steps", "eval_every_epochs")
        return self


class TransformConfig(WithArguments):
    """A change to the rows of a batch; one that uses random numbers is for training alone."""

    name: str = option(..., "crop_and_flip, flip_and_shift or normalize.")


class MixtureConfig(Section):
    """A folder of a mixture."""

    dir: ExpandedPath = option(..., "Folder of the files.")
    weight: float = option(
        ..., "Frequency of its examples, relative to other folders.", gt=0, lt=float("inf")
    )


class DataConfig(NamedSection):
    """The data: a data set of jddp.data, or your own callable that returns (train, test)."""

    name: str | None = option("fashion_mnist", "A data set of jddp.data.")
    dir: ExpandedPath | None = option(
        None, "Folder of the files, for data sets that have one.", "result"
    )
    mixture: list[MixtureConfig] = option(
        [], "Or several: a list of dir and weight, of exact shares in training."
    )
    global_batch_size: int = option(128, "Examples a step, over all replicas.", ge=1)
    shuffle: bool = option(True, "A new order each epoch, from the seed.")
    sample_weights: ExpandedPath | None = option(
        None, "A .npy file: how often each example is wanted."
    )
    drop_remainder: bool = option(False, "Drop the last partial batch, instead of padding it.")
    transforms: list[TransformConfig] | None = option(
        None, "Changes to rows: a list of name and kwargs; null for the set's own."
    )
    num_workers: int = option(0, "Processes that read batches; 0 reads in a thread.", "none", ge=0)

    @model_validator(mode="after")
    def _mixture_has_its_own_order(self) -> "DataConfig":
        folders = [part.dir for part in self.mixture]
        if len({*folders}) < len(folders):
            raise ValueError("'mixture' has a folder twice: give each one weight")
        beside = [key for key in ("target", "dir", "sample_weights") if getattr(self, key)]
        beside += [] if self.shuffle else ["shuffle"]
        if self.mixture and beside:
            raise ValueError(f"'mixture' and {beside[0]!r} cannot be combined: drop one of them")
        return self


class ModelConfig(NamedSection):
    """The model: one of jddp.zoo.models, or your own Flax module class, Linen or NNX."""

    name: str | None = option("cnn", "A model of jddp.zoo.models.")
    init_from: ExpandedPath | None = option(
        None, "Initial weights: a file (.safetensors, .pt, ...), a run, a Hub folder."
    )
    weights_partial: bool = option(False, "Keep the model's arrays where given ones do not fit.")


class LossConfig(NamedSection):
    """The loss function: one of jddp.zoo.losses, or your own loss_fn(model, batch[, train])."""

    name: str | None = option("cross_entropy", "A loss of jddp.zoo.losses.")
    eval_target: str | None = option(
        None, "Your own function for evaluation, of that form; or the loss itself."
    )


class ScheduleConfig(WithArguments):
    """The schedule of the learning rate after warm-up."""

    name: str = option(
        "cosine_decay_schedule", "Any schedule optax.<name>; peak rate and length are filled in."
    )


class GroupConfig(NamedSection):
    """Parameters that are trained in another way than the rest, perhaps by another optimizer."""

    patterns: list[str] = option([], "Regular expressions for whole paths: backbone/.*")
    learning_rate: float | None = option(None, "Peak rate; by default the rate of the rest.", gt=0)

    @model_validator(mode="after")
    def _one_of_both(self) -> "GroupConfig":
        if not self.patterns or None not in (self.name, self.target):
            raise ValueError("give 'patterns', and at most one of 'name' and 'target'")
        return self


class OptimizerConfig(NamedSection):
    """The optimizer: one of optax, or your own callable that returns one."""

    name: str | None = option("adamw", "Any optimizer optax.<name>.")
    learning_rate: float = option(1e-3, "Peak rate, reached after warm-up.", gt=0)
    warmup_steps: int = option(0, "Steps of linear warm-up from zero.", ge=0)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    groups: dict[str, GroupConfig] = Field(default_factory=dict)


class MeshConfig(Section):
    """The devices."""

    num_devices: Annotated[int, Field(ge=1)] | Literal["auto"] = option(
        "auto", "Devices of all processes; auto: all GPUs, else 8 virtual CPUs.", "rounding"
    )
    axis_name: str = option("data", "Name of the axis of the replicas.", "none")


class CheckpointConfig(Section):
    """Checkpointing and resumption."""

    every_steps: Annotated[int, Field(ge=1)] | Literal["continuous"] | None = option(
        None, "Steps between checkpoints; continuous: when the last is written.", "none"
    )
    every_epochs: float | None = option(
        None, "Epochs between checkpoints; or every_steps.", "none", gt=0
    )
    keep: int = option(3, "Newest checkpoints to keep.", "none", ge=1)
    keep_every_steps: int | None = option(None, "Checkpoints of its multiples stay.", "none", ge=1)
    memory_every_steps: int | None = option(
        None,
        "Steps between states in the hosts' memory; null: 1 % of the time; 0: none.",
        "none",
        ge=0,
    )
    best_metric: str | None = option(None, "Metric whose best state is kept, in <run.dir>/best.")
    resume: Literal["auto", "never", "must", "changed"] = option(
        "auto",
        "Resume if there is a checkpoint, never, must; changed: another program too.",
        "none",
    )
    allow_changed: list[str] = option(
        [], "Keys that may differ when this run resumes; 'data': the data themselves.", "none"
    )

    @model_validator(mode="after")
    def _one_unit_and_a_known_direction(self) -> "CheckpointConfig":
        _refuse_both(self, "every_steps", "every_epochs")
        if self.best_metric is not None and direction_of(self.best_metric) is None:
            raise ValueError(
                f"best_metric {self.best_metric!r} does not show whether larger or smaller is "
                "better. List the callback keep_best, with the arguments metric and mode"
            )
        return self


class CallbackConfig(NamedSection):
    """A callback, which is called between the steps of a run."""


class WatchdogConfig(Section):
    """Seconds after which a step is reported as hanging, which ends all processes."""

    step_seconds: float | None = option(
        None, "A later step; by default 30 times the longest, or 120.", "none", gt=0
    )


class ReportConfig(Section):
    """The reports of a run."""

    sinks: list[str] = option(
        [], "Who gets the records, too: tensorboard, wandb, package.module:Name.", "none"
    )


class Config(Section):
    """A run, completely described.

    Raises:
      ConfigMistakes: With every mistake in the given values, one line each.
    """

    seed: int = option(0, "Seed of parameters, order of examples and dropout.", ge=0, lt=2**32)
    run: RunConfig = Field(default_factory=RunConfig)
    train: TrainConfig
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    ddp: DdpConfig = Field(default_factory=DdpConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    callbacks: list[CallbackConfig] = option(
        [], "Each by name (early_stopping, keep_best, sample_text) or target; kwargs.", "result"
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{"train": None, **values})
        except ValidationError as error:
            raise ConfigMistakes(describe_mistakes(error, type(self))) from None


def default_of(key: str, otherwise: object) -> object:
    """Returns the default of a key, such as "ddp.ema_decay"; something else for an unknown key."""
    field = keys_of(Config).get(tuple(key.split(".")))
    return otherwise if field is None else field.get_default(call_default_factory=True)


def effect_of(key: str, *values: object) -> str:
    """Returns the effect of another value of a key on the numbers of a run.

    Args:
      key: The key, such as "ddp.reduction.overlap".
      *values: The two values; without them, the largest effect of any two.
    """
    field = keys_of(Config).get(tuple(key.split(".")))
    about: Any = None if field is None else field.json_schema_extra
    if about is None:
        return "numbers"
    if values and all(value in about["alike"] for value in values):
        return "rounding"
    return about["effect"]
