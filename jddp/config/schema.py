"""The sections of a config: every key with its type, range, default and meaning.

    Config(train={"num_steps": 100}, model={"name": "mlp"}).optimizer.learning_rate

Sections are frozen and closed to keys they do not know. This room knows names and numbers; what
models, data sets and optimizers exist is known where they live.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator

from jddp.config.mistakes import ConfigMistakes, describe_mistakes
from jddp.config.permissions import expand
from jddp.errors import ConfigError

Kwargs = dict[str, Any]


def _expanded(path: str) -> str:
    try:
        return str(expand(path)) if path.startswith("~") else path
    except ConfigError as error:
        raise ValueError(str(error).rstrip(".")) from None


Path = Annotated[str, AfterValidator(_expanded)]


class Section(BaseModel):
    """A part of the config: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, values: Any) -> Any:
        """A section whose keys are all commented out reads as None."""
        return {} if values is None else values


class NamedSection(Section):
    """A part that is chosen by a registered name or by the user's own target, never both."""

    name: str | None = Field(None, description="A registered name.")
    target: str | None = Field(None, description="One's own, as package.module:Name.")
    kwargs: Kwargs = Field(default_factory=dict, description="Its arguments.")

    @model_validator(mode="before")
    @classmethod
    def _target_replaces_default_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("target") is not None:
            return {"name": None, **values}
        return values

    @model_validator(mode="after")
    def _one_of_both(self) -> "NamedSection":
        if (self.name is None) == (self.target is None):
            raise ValueError("give either 'name' or 'target'")
        return self


class RunConfig(Section):
    """Where a run is kept."""

    dir: Path | None = Field(None, description="Run directory; runs/<config name> unless given.")


class TrainConfig(Section):
    """How long training takes, and how often it reports."""

    num_steps: int | None = Field(None, ge=1, description="Optimizer steps in all; or num_epochs.")
    num_epochs: float | None = Field(None, gt=0, description="Passes over the data; or num_steps.")
    eval_every_steps: int | None = Field(
        None, ge=1, description="Steps between evaluations; the end is always evaluated."
    )
    eval_params: Literal["params", "ema"] = Field(
        "params", description="Evaluate the parameters, or their moving average."
    )
    log_every_steps: int = Field(50, ge=1, description="Steps between lines of metrics.")
    check_replicas_every_steps: int | None = Field(
        500, ge=1, description="Steps between comparisons of all replicas, bit by bit; or null."
    )
    max_consecutive_skips: int = Field(
        10, ge=1, description="As many steps in a row that ddp.skip_nonfinite skips end the run."
    )

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError("give either 'num_steps' or 'num_epochs'")
        return self


class DataConfig(NamedSection):
    """What is learnt from."""

    name: str | None = Field("fashion_mnist", description="A data set of jddp.data.")
    target: str | None = Field(None, description="One's own: a callable giving (train, test).")
    source: str = Field("embedded", description="Fashion-MNIST: 'embedded' (15,000) or 'full'.")
    dir: Path | None = Field(None, description="Folder of the files, for data sets that have one.")
    global_batch_size: int = Field(128, ge=1, description="Examples a step, over all replicas.")
    shuffle: bool = Field(True, description="A new order each epoch, from the seed.")
    sample_weights: Path | None = Field(
        None, description="A .npy file: how often each training example is wanted."
    )
    drop_remainder: bool = Field(
        False, description="End with the last full batch, instead of filling one up."
    )
    augment: bool = Field(True, description="Random changes to examples, where the set has any.")
    mixup: float | None = Field(
        None, gt=0, description="Lay another image over each, with shares of Beta(mixup, mixup)."
    )
    num_workers: int = Field(
        0, ge=0, description="Processes that read training batches; 0 reads in a thread."
    )
    allow_changed: bool = Field(
        False, description="Go on with data that are not those the run was started with."
    )


class ModelConfig(NamedSection):
    """What learns."""

    name: str | None = Field("cnn", description="A model of jddp.zoo.models.")
    target: str | None = Field(None, description="One's own Flax module class, Linen or NNX.")
    init_from: Path | None = Field(
        None, description="To start from: .safetensors, .msgpack, a run directory, orbax's folder."
    )
    weights_partial: bool = Field(
        False, description="Whether the model keeps its own where they do not fit."
    )


class LossConfig(NamedSection):
    """What is made small."""

    name: str | None = Field("cross_entropy", description="A loss of jddp.zoo.losses.")
    target: str | None = Field(None, description="One's own loss_fn(model, batch[, train]).")


class ScheduleConfig(Section):
    """How the learning rate changes after warm-up."""

    name: str = Field("cosine_decay_schedule", description="Any schedule optax.<name>.")
    kwargs: Kwargs = Field(
        default_factory=dict, description="Its arguments; peak rate and length are filled in."
    )


class OptimizerConfig(NamedSection):
    """How parameters move."""

    name: str | None = Field("adamw", description="Any optimizer optax.<name>.")
    target: str | None = Field(None, description="One's own: a callable giving an optax optimizer.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak rate, reached after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from zero.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    decay_norms_and_biases: bool = Field(
        False, description="Weight decay on norms and biases too, not on matrices alone."
    )


class MeshConfig(Section):
    """What it runs on."""

    num_devices: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Devices of all processes; auto: all GPUs, else 8 virtual CPUs."
    )


Size = Annotated[float, Field(gt=0)]


class CommHookConfig(NamedSection):
    """How the buckets of all replicas become their mean."""

    name: str | None = Field("mean", description="mean, which is exact, or powersgd.")
    target: str | None = Field(None, description="One's own: a callable giving a jddp.CommHook.")


class OuterConfig(NamedSection):
    """What takes the mean move of the replicas for a gradient; by default it gives their mean."""

    name: str | None = Field("sgd", description="Any optimizer optax.<name>.")
    target: str | None = Field(None, description="One's own: a callable giving an optax optimizer.")
    learning_rate: float = Field(1.0, gt=0, description="Of SGD, 1 gives the replicas' mean.")


class LocalStepsConfig(Section):
    """Steps that each replica takes alone, between meetings at which parameters travel."""

    every: int | None = Field(
        None, ge=1, description="Steps from one meeting to the next; null averages gradients."
    )
    start: int = Field(0, ge=0, description="As many first steps average gradients.")
    outer: OuterConfig = Field(default_factory=OuterConfig)

    @model_validator(mode="after")
    def _every_is_given(self) -> "LocalStepsConfig":
        if self.every is None and (self.start or self.outer != OuterConfig()):
            raise ValueError("give 'every' too, the steps from one meeting to the next")
        return self


class DdpConfig(Section):
    """How replicas are kept alike: the options of `jddp.DataParallel`."""

    axis_name: str | None = Field(None, description="Name of the axis of the replicas; or data.")
    bucket_mb: Size | Annotated[list[Size], Field(min_length=1)] = Field(
        25.0, description="Size of a gradient bucket, in MiB; or a list, of which the last repeats."
    )
    first_bucket_mb: float = Field(1, gt=0, description="Size of the first bucket, in MiB.")
    last_bucket_mb: float | None = Field(
        None, gt=0, description="Size of the last bucket, in MiB, to have it smaller."
    )
    layout: Literal["auto", "leaf", "flat"] = Field(
        "auto", description="Buckets reduced leaf by leaf, or packed into one vector."
    )
    overlap: bool | Literal["auto"] = Field(
        "auto", description="Buckets reduced inside the backward pass, or after it; auto: on GPUs."
    )
    wire_dtype: Literal["bfloat16", "float16"] | None = Field(
        None, description="What wider gradients are narrowed to for the way."
    )
    comm_hook: CommHookConfig = Field(default_factory=CommHookConfig)
    unused_parameters: Literal["zero", "skip", "error"] = Field(
        "zero", description="Parameters without a gradient: given zeros, left alone, or refused."
    )
    batch_norm: Literal["sync", "broadcast", "local"] = Field(
        "sync", description="Batch statistics: of the global batch, replica 0's, or each its own."
    )
    batch_norm_group_size: int | None = Field(
        None, ge=1, description="Neighbouring replicas that share statistics under sync; or all."
    )
    per_replica: list[str] = Field(
        [], description="Collections, or classes of variables, of which each replica has its own."
    )
    state_reduction: dict[str, Literal["mean", "sum", "first"]] = Field(
        {}, description="By collection or class: how replicas agree on state made from their rows."
    )
    batch_norm_unbiased: bool = Field(
        False, description="Running variances of n / (n - 1), as PyTorch keeps them."
    )
    accumulate_steps: int = Field(1, ge=1, description="Micro-steps to one optimizer step.")
    shard_optimizer: bool = Field(
        False, description="The optimizer's state and its update split over the replicas."
    )
    logical_replicas: int | None = Field(
        None,
        ge=1,
        description="Logical replicas: equal bits on any number of devices that divides.",
    )
    local_steps: LocalStepsConfig = Field(default_factory=LocalStepsConfig)
    max_grad_norm: float | None = Field(None, gt=0, description="Clip the mean gradient to this.")
    ema_decay: float | None = Field(
        None, gt=0, lt=1, description="Decay of the moving average of the parameters."
    )
    skip_nonfinite: bool = Field(
        False,
        description="A step whose loss, gradients or other state are not finite has no effect.",
    )
    loss_scale: float | Literal["dynamic"] | None = Field(
        None, description="For float16: a power of two, or dynamic, which finds it by skipping."
    )


class CheckpointConfig(Section):
    """How a run survives."""

    every_steps: int | None = Field(
        None, ge=1, description="Steps between checkpoints; the end is always saved."
    )
    keep: int = Field(3, ge=1, description="Newest checkpoints to keep.")
    keep_every_steps: int | None = Field(
        None, ge=1, description="Checkpoints of multiples of it are kept too."
    )
    best_metric: str | None = Field(
        None, description="Metric of the evaluation whose best state is kept, in <run.dir>/best."
    )
    best_mode: Literal["min", "max"] = Field("min", description="Which way it improves.")
    resume: Literal["auto", "never", "must"] = Field(
        "auto", description="Go on from the last checkpoint: if there is one, never, or only so."
    )


class WatchdogConfig(Section):
    """After how many seconds a phase is said to hang, which ends all processes."""

    start_seconds: float = Field(1800, gt=0, description="Of the first state, or reading one.")
    compile_seconds: float = Field(3600, gt=0, description="Of the first step.")
    step_seconds: float | None = Field(
        None, gt=0, description="Of a later step; by default 30 times the longest, or 120."
    )
    evaluation_seconds: float = Field(3600, gt=0, description="Of a batch of an evaluation.")
    save_seconds: float = Field(3600, gt=0, description="Of waiting for a checkpoint.")


class Config(Section):
    """A run, completely described.

    Raises:
      ConfigMistakes: With every mistake in the given values, one line each.
    """

    seed: int = Field(
        0, ge=0, lt=2**32, description="Makes parameters, order of examples and dropout."
    )
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

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{"train": None, **values})
        except ValidationError as error:
            raise ConfigMistakes(describe_mistakes(error, type(self))) from None

    @model_validator(mode="after")
    def _keys_agree(self) -> "Config":
        if self.train.eval_params == "ema" and self.ddp.ema_decay is None:
            raise ConfigError(
                "train.eval_params=ema needs ddp.ema_decay, e.g. ddp.ema_decay=0.999."
            )
        return self
