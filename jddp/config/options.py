"""The base of the sections of a config, and the sections that are options of `DataParallel`.

    jddp.DataParallel(..., reduction=jddp.Reduction(wire_dtype="bfloat16", bucket_mb=25))
    ddp: {reduction: {wire_dtype: bfloat16, bucket_mb: 25}}                        # the same

Sections are immutable, and know no other keys. Type, bounds, default, text and effect of each value
stand in one place, for both. `schema` has the other sections.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import pydantic

from jddp.config.keys import ConfigMistakes, describe_mistakes
from jddp.ground.typing import JsonObject

Effect = Literal["none", "result", "rounding", "numbers"]
Chosen = TypeVar("Chosen", bound="WordedSection")


def option(
    default: Any,
    description: str,
    effect: Effect = "numbers",
    *,
    alike: Sequence[str | None] = (),
    **rules: Any,
) -> Any:
    """Declares a key of a config.

    Args:
      default: Value where the key is not given.
      description: One line on its meaning.
      effect: Effect of another value on the numbers of a run. "none": all steps are bitwise the
        same. "result": so are all steps that both runs take, but one may take more of them, or be
        evaluated after others, so that its best evaluation is another. "rounding": they are the
        same up to rounding, but for random numbers, statistics and hooks of each replica,
        micro-batch or bucket. "numbers": steps, evaluations or the state kept as best are others,
        so it is another run.
      alike: Values that can replace each other with the effect "rounding" alone.
      **rules: Bounds of its values, as `pydantic.Field` takes them.
    """
    about: Any = {"effect": effect, "alike": list(alike)}
    return pydantic.Field(default, description=description, json_schema_extra=about, **rules)


class Section(pydantic.BaseModel):
    """A part of the config: immutable, without unknown keys."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, values: object) -> object:
        """A section whose keys are all commented out reads as None."""
        return {} if values is None else values


class WithArguments(Section):
    """A part that is made with arguments."""

    kwargs: JsonObject = option({}, "Its arguments.")


class NamedSection(WithArguments):
    """A part that is chosen by a registered name or by the user's own target, never both."""

    name: str | None = option(None, "A registered name.")
    target: str | None = option(None, "Your own, as package.module:Name.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _target_replaces_default_name(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("target") is not None:
            return {"name": None, **values}
        return values

    @pydantic.model_validator(mode="after")
    def _one_of_both(self) -> "NamedSection":
        if (self.name is None) == (self.target is None):
            raise ValueError("give either 'name' or 'target'")
        return self


class WordedSection(Section):
    """A section for which a word can stand, in a config and in Python.

    Attributes:
      WORD: The key whose value the word is.
    """

    WORD: ClassVar[str] = "name"

    @classmethod
    def of_word(cls, word: object) -> dict[str, object]:
        """Returns the values for which the word stands, by key."""
        return {cls.WORD: word}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _word_is_spelled_out(cls, values: object) -> object:
        return cls.of_word(values) if isinstance(values, str) else values

    @classmethod
    def chosen(cls: type[Chosen], given: object, option: str) -> Chosen:
        """Returns the section that a user of Python has given, or that a word stands for.

        Args:
          given: A word, a section, or None for the defaults.
          option: Name of the option, for the error.

        Raises:
          ConfigError: If it is neither, with the words that there are.
        """
        if isinstance(given, cls):
            return given
        with _one_line_each(cls, f"{option}={given!r}"):
            return cls(**({} if given is None else cls.of_word(given)))


class ObjectSection(Section):
    """A section that users of Python make, whose mistakes are one line each."""

    if not TYPE_CHECKING:  # Type checkers make the signature from the fields.

        def __init__(self, **values):
            with _one_line_each(type(self), f"jddp.{type(self).__name__}"):
                super().__init__(**values)


@contextlib.contextmanager
def _one_line_each(schema: type[Section], called: str) -> Iterator[None]:
    """Describes the mistakes of a section in the words of a config, each after the call's name."""
    try:
        yield
    except pydantic.ValidationError as error:
        mistakes = describe_mistakes(error, schema)
        lines = [x._replace(text=f"{called}: {x.text}") for x in mistakes]
        raise ConfigMistakes(lines) from None


def _name_of_dtype(given: object) -> object:
    """The name of a dtype such as `jnp.bfloat16`; something else as it is."""
    return getattr(getattr(given, "dtype", given), "name", given)


HalfPrecision = Annotated[
    Literal["bfloat16", "float16"] | None, pydantic.BeforeValidator(_name_of_dtype)
]
Size = Annotated[float, pydantic.Field(gt=0)]
Sizes = Annotated[list[Size], pydantic.Strict(False), pydantic.Field(min_length=1)]


class OuterConfig(NamedSection):
    """The outer optimizer, whose gradient is the mean change of the replicas' parameters."""

    name: str | None = option(
        "sgd", "Any optimizer optax.<name>; its learning rate is 1 by default."
    )


# Keys of each strategy; the first one must be given.
_KEYS_OF_STRATEGIES = {
    "local_steps": ("every", "start", "outer"),
    "logical_replicas": ("number",),
    "fsdp": ("regather", "group_size"),
}


class StrategyConfig(WordedSection):
    """How parameters and the optimizer's state are kept, and when replicas synchronize."""

    name: Literal["ddp", "zero1", "fsdp", "local_steps", "logical_replicas"] = option(
        "ddp",
        "zero1 shards the optimizer's state, fsdp parameters too; others: keys below.",
        alike=("ddp", "zero1", "fsdp"),
    )
    regather: bool = option(
        True, "fsdp: gather parameters again in the backward pass, or keep them.", "rounding"
    )
    group_size: int | None = option(
        None,
        "fsdp: neighbouring replicas that divide parameters among them; null for all.",
        "rounding",
        ge=2,
    )
    every: int | None = option(None, "local_steps: steps from one outer step to the next.", ge=1)
    start: int = option(0, "local_steps: number of first steps that average gradients.", ge=0)
    outer: OuterConfig = pydantic.Field(default_factory=OuterConfig)
    number: int | None = option(
        None, "logical_replicas: bitwise identical on any CPU devices that divide it.", ge=1
    )

    @pydantic.model_validator(mode="after")
    def _keys_belong_to_the_name(self) -> "StrategyConfig":
        fields = type(self).model_fields
        for name, keys in _KEYS_OF_STRATEGIES.items():
            if self.name == name and getattr(self, keys[0]) is None:
                raise ValueError(f"{name} needs {keys[0]!r}")
            for key in keys:
                default = fields[key].get_default(call_default_factory=True)
                if self.name != name and getattr(self, key) != default:
                    raise ValueError(f"{key!r} belongs to {name}, and the name is {self.name}")
        return self


class CommHookConfig(NamedSection):
    """The communication hook, which averages the buckets of all replicas."""

    name: str | None = option("mean", "mean, which is exact, or powersgd.")


class BucketSection(WordedSection):
    """The form in which gradients are sent."""

    WORD = "wire_dtype"

    wire_dtype: HalfPrecision = option(
        None, "The dtype to which wider gradients are cast on the wire."
    )
    bucket_mb: Size | Sizes = option(
        [1.0, 25.0], "Size of a bucket, in MiB; or a list, of which the last repeats.", "rounding"
    )
    layout: Literal["auto", "leaf", "flat"] = option(
        "auto", "Buckets reduced leaf by leaf, or packed into one vector.", "rounding"
    )
    overlap: bool | Literal["auto"] = option(
        "auto", "Buckets reduced inside the backward pass, or after it; auto: on GPUs.", "rounding"
    )


class ReductionConfig(BucketSection):
    """How gradients are averaged."""

    hook: CommHookConfig = pydantic.Field(default_factory=CommHookConfig)


class Reduction(ObjectSection, BucketSection):
    """How gradients are averaged.

        jddp.Reduction(wire_dtype="bfloat16")          # or reduction="bfloat16"
        jddp.Reduction(hook=jddp.powersgd(rank=4))

    Attributes:
      wire_dtype: Dtype to which wider gradients are cast on the wire: "bfloat16" or "float16".
      bucket_mb: Largest size of a gradient bucket on the wire, in MiB; or sizes of the first, the
        second, ...: the last one repeats.
      layout: Form of a bucket: "leaf" (gradients as they are), "flat" (one vector), or "auto": flat
        on GPUs, leaf elsewhere.
      overlap: Whether buckets are reduced inside the backward pass, each where its last gradient is
        made, and not after it; or "auto": on several GPUs. The numbers are the same.
      hook: A `jddp.CommHook` that reduces a bucket, in place of the mean.

    Raises:
      ConfigError: If a value breaks its rule.
    """

    hook: Any = option(None, "A jddp.CommHook in place of the mean.")


class BatchNormConfig(WordedSection):
    """The statistics that batch norm uses."""

    name: Literal["sync", "broadcast", "local"] = option(
        "sync", "Batch statistics: of the global batch, replica 0's, or each replica's."
    )
    group_size: int | None = option(
        None, "sync: neighbouring replicas that share statistics; or all.", ge=1
    )
    unbiased: bool = option(False, "sync: unbiased running variances, as PyTorch has them.")

    @pydantic.model_validator(mode="after")
    def _of_sync_alone(self) -> "BatchNormConfig":
        if self.name != "sync" and (self.group_size is not None or self.unbiased):
            raise ValueError(f"'group_size' and 'unbiased' belong to sync, not to {self.name}")
        return self


class SyncBatchNorm(ObjectSection, BatchNormConfig):
    """Batch norm with the statistics of the global batch, or of groups of replicas.

    Attributes:
      group_size: Number of neighbouring replicas that share statistics; None for all.
      unbiased: Whether running variances are unbiased, as PyTorch keeps them.

    Raises:
      ConfigError: If a value breaks its rule.
    """

    name: Literal["sync"] = option("sync", "Always sync.")


class PrecisionConfig(WordedSection):
    """The precision of the model's arithmetic."""

    WORD = "compute_dtype"

    compute_dtype: HalfPrecision = option(
        None, "Dtype of the model's arithmetic; its parameters and the loss are float32."
    )
    loss_scale: float | Literal["dynamic"] | None = option(
        None, "For float16: a power of two, or dynamic, adapted by skipping steps."
    )

    @classmethod
    def of_word(cls, word: object) -> dict[str, object]:
        """Returns the dtype, for float16 with the loss scale that it needs."""
        dtype = _name_of_dtype(word)
        scale = {"loss_scale": "dynamic"} if dtype == "float16" else {}
        return {"compute_dtype": dtype, **scale}


class Precision(ObjectSection, PrecisionConfig):
    """The precision of the model's arithmetic.

        jddp.Precision(compute_dtype="float16", loss_scale=1024)     # "float16" scales dynamically

    Attributes:
      compute_dtype: "bfloat16" or "float16": dtype to which parameters are cast where the loss
        calls the model, and inputs where they reach a product of one of its layers, or before the
        model, if they reach a product of its own code. Its outputs are cast back: the loss, batch
        statistics, gradients and the optimizer are in float32. A layer with another dtype is
        refused. In NNX a submodule that the loss itself calls returns this dtype: cast what it
        returns.
      loss_scale: A power of two by which each replica's mean loss is multiplied in the backward
        pass, for models that compute in float16, so that small gradients do not become zero.
        Averaged gradients are divided by it. "dynamic" adapts it as PyTorch's GradScaler does, and
        skips steps whose gradients overflow, as `skip_nonfinite` does.

    Raises:
      ConfigError: If a value breaks its rule.
    """


class DdpConfig(Section):
    """Replication: the options of `jddp.DataParallel`."""

    strategy: StrategyConfig = pydantic.Field(default_factory=StrategyConfig)
    reduction: ReductionConfig = pydantic.Field(default_factory=ReductionConfig)
    batch_norm: BatchNormConfig = pydantic.Field(default_factory=BatchNormConfig)
    precision: PrecisionConfig = pydantic.Field(default_factory=PrecisionConfig)
    state: dict[str, Literal["mean", "sum", "first", "per_replica"]] = option(
        {}, "By collection or class: replicas agree by this rule, or keep their own."
    )
    frozen: list[str] = option([], "Parameters that are not trained: expressions for paths.")
    accumulate_steps: int = option(1, "Micro-batches of one optimizer step.", "rounding", ge=1)
    max_grad_norm: float | None = option(None, "Clip the mean gradient to this.", gt=0)
    ema_decay: float | None = option(None, "Decay of the parameters' moving average.", gt=0, lt=1)
    skip_nonfinite: bool = option(False, "Skip steps if loss, gradients or state are not finite.")
    unused_parameters: Literal["zero", "skip", "error"] = option(
        "zero", "Parameters that get no gradient: use zeros, skip their update, or fail."
    )
