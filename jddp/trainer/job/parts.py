"""Resolves the names of a config: data, model, loss, optimizer, hook; before compiling.

A registered name is looked up in its package; a target, `package.module:Name`, is imported.
Mistakes in several sections are collected, so that one run of the command shows them all.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jddp.config import options
from jddp.config.files import with_overrides
from jddp.config.schema import Config
from jddp.data import DataSet, DataSource, count_steps, make_source, source_of
from jddp.data.examples import Examples, column_of
from jddp.data.periods import Epochs
from jddp.data.source import mixed_source
from jddp.engine.state import TrainState
from jddp.engine.strategy import FSDP, LocalSteps, Strategy
from jddp.ground import names
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.names import ADDED_CALLBACKS, added, tool
from jddp.ground.typing import JsonObject, LossFn, Settings
from jddp.modules.base import COLLECTION
from jddp.reduce.hooks import CommHook
from jddp.trainer.job.data import check_listed, source_of_batches, stream_arguments
from jddp.trainer.reports.sinks import ChosenSink, choose_sinks
from jddp.trainer.run import Callback, Every
from jddp.trainer.watching import EarlyStopping, KeepBest
from jddp.zoo import optimizers
from jddp.zoo.losses import LOSSES, next_token
from jddp.zoo.models import MODELS, Module, make_model

Schedule = Callable[[int], jax.typing.ArrayLike]


class OptimizerSpec(NamedTuple):
    """The optimizer of one group of parameters.

    Attributes:
      factory: Function that makes it.
      learning_rate: Peak rate.
      kwargs: Arguments of that function.
      key: The section of the config, for errors.
    """

    factory: Callable[..., Any]
    learning_rate: float
    kwargs: JsonObject
    key: str


def optimizer_of(
    config: Config, num_steps: int = 1, *, at_peak: bool = False
) -> tuple[optimizers.Transformation, Schedule | None]:
    """The optimizer that a config names, and the schedule of parameters outside of all groups.

    Args:
      config: The config.
      num_steps: Number of steps of the run.
      at_peak: Whether each schedule stays at its peak, for the comparison of a single step.

    Raises:
      ConfigError: If a name or an argument is unknown.
    """
    section = config.optimizer
    length: JsonObject = {"num_steps": num_steps, "warmup_steps": section.warmup_steps}
    made: dict[str, Any] = {}
    for name, (factory, peak, kwargs, key) in _specs(config).items():
        rate = optimizers.make_schedule(
            **section.schedule.model_dump(), learning_rate=peak, **length
        )
        if at_peak:
            rate = optimizers.hold_peak(rate, max(num_steps, section.warmup_steps + 1))
        made[name] = optimizers.make_optimizer(factory, schedule=rate, kwargs=kwargs, key=key)
    optimizer, rate = made[optimizers.REST]
    if section.groups:
        groups = {
            n: optimizers.ParameterGroup(section.groups[n].patterns, made[n][0])
            for n in section.groups
        }
        optimizer = optimizers.by_group(groups, optimizer)
    return optimizer, rate


def optimizer_table(config: Config, state: TrainState) -> Iterator[str]:
    """A line for each parameter: its peak rate, optimizer and group.

    Empty where all parameters are trained with the same settings.
    """
    section = config.optimizer
    specs = _specs(config)
    frozen = optimizers.paths_of(state.model_state.get(COLLECTION, {}))
    if not (section.groups or frozen):
        return
    paths = optimizers.paths_of(state.params)
    groups = optimizers.groups_of({name: x.patterns for name, x in section.groups.items()}, paths)
    yield f"{'peak rate':>10}  {'optimizer':12} {'group':12} parameter"
    for path in paths:
        spec = specs[groups[path]]
        rate = spec.kwargs.get("learning_rate", spec.learning_rate)
        yield f"{rate:10.4g}  {names.name_of_callable(spec.factory):12} {groups[path]:12} {path}"
    for path in frozen:
        yield f"{'frozen':>10} {'':26}{path}"


def _specs(config: Config) -> dict[str, OptimizerSpec]:
    """The optimizer of each group, and the optimizer of the other parameters."""
    section = config.optimizer
    first = optimizers.factory_of(names.named(section, "optimizer"), key="optimizer")
    rest = OptimizerSpec(first, section.learning_rate, section.kwargs, "optimizer")
    specs = {optimizers.REST: rest}
    for name, group in section.groups.items():
        key = f"optimizer.groups.{name}"
        own = first
        if group.name or group.target:
            own = optimizers.factory_of(names.named(group, key), key=key)
        kwargs = {**(section.kwargs if own is first else {}), **group.kwargs}
        specs[name] = OptimizerSpec(own, group.learning_rate or section.learning_rate, kwargs, key)
    return specs  # `by_group` refuses a group with the name of the rest.


def period_of(section: options.Section, prefix: str = "") -> Every:
    """The period that a section has in steps or in epochs; None where it has neither.

    Args:
      section: A section of a config.
      prefix: Beginning of the two keys, such as "eval_".
    """
    epochs = getattr(section, f"{prefix}every_epochs")
    every: int | str | None = getattr(section, f"{prefix}every_steps")
    return every if epochs is None else Epochs(epochs)


def num_steps_of(config: Config, num_examples: int) -> int:
    """Counts all steps of a job, including steps before a resume.

    Raises:
      ConfigError: If the number of epochs is not positive.
      DataError: If only full batches count, and there is none.
    """
    train, data = config.train, config.data
    if train.num_epochs is not None:
        size, drops = data.global_batch_size, data.drop_remainder
        return count_steps(train.num_epochs, num_examples, size, drops)
    assert train.num_steps is not None  # The config requires one of the two.
    return train.num_steps


def mean() -> None:
    """The exact mean, which is no hook."""


COMM_HOOKS = {"mean": mean, "powersgd": "jddp.workbench.powersgd:powersgd"}


@dataclass(frozen=True)
class Parts:
    """The objects that a config names.

    Attributes:
      config: The config, with the sizes of the model that the data have filled in.
      model: A Linen or NNX module.
      source: Source of the data, with their shapes.
      loss_fn: Loss function, `loss_fn(model, batch[, train])`.
      eval_fn: Function for evaluation, of the same form; None for the loss function.
      ddp_options: Options of `DataParallel` under `ddp`, with the objects that they name.
      sinks: Sinks, which get the records of the run.
    """

    config: Config
    model: Module
    source: DataSource
    loss_fn: LossFn
    eval_fn: LossFn | None
    ddp_options: JsonObject
    sinks: Sequence[ChosenSink]


def resolve_parts(config: Config) -> Parts:
    """Makes every part that `config` names.

    Raises:
      ConfigError: With all names that cannot be resolved, one line each.
      DataError: If the user's own data are bad.
    """
    mistakes: list[str] = []

    def attempt(resolve: Callable[[Config], Any]) -> Any:
        try:
            return resolve(config)
        except ConfigError as error:
            mistakes.append(str(error))

    attempt(optimizer_of)  # Finds mistakes early; `build` makes it again with the number of steps.
    source = attempt(find_source)
    filled = attempt(functools.partial(_model, source=source))
    loss_fn = attempt(functools.partial(find_loss, source=source))
    eval_fn = attempt(find_eval_fn)
    ddp_options = attempt(_ddp_options)
    sinks = attempt(lambda config: choose_sinks(config.report.sinks, key="report.sinks"))
    attempt(find_callbacks)  # Callbacks are made where the run begins.
    attempt(functools.partial(check_listed, source=source))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    config, model = filled
    return Parts(config, model, source, loss_fn, eval_fn, ddp_options, sinks)


def find_source(config: Config) -> DataSource:
    """The source of the data that a config names."""
    data = config.data
    if data.name is not None:
        make = functools.partial(make_source, data.name, kwargs=data.kwargs)
        if not data.mixture:
            return make(directory=data.dir)
        sources = {part.dir: make(directory=part.dir) for part in data.mixture}
        return mixed_source(sources, [part.weight for part in data.mixture])
    assert data.target is not None
    found = names.resolve_target(data.target, key="data.target")
    filled = stream_arguments(found, config)
    names.check_arguments(found, data.kwargs, key="data.kwargs", filled=filled)
    pair = found(**data.kwargs, **filled)
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise _wrong(data, "data", pair, "(train, test)")
    train = pair[0]
    has_numbers = hasattr(train, "__len__") and hasattr(train, "__getitem__")
    if hasattr(train, "__iter__") and not has_numbers and not isinstance(train, Examples):
        return source_of_batches(data.target, *pair)  # A stream can only be iterated.
    return source_of(data.target, *pair)


def _model(config: Config, source: DataSource | None) -> tuple[Config, Module]:
    """The model, and the config with the sizes of the model that the data determine."""
    sizes: Settings = {} if source is None else source.sizes
    section = config.model
    factory = names.named(section, "model")
    defaults = names.defaults_of(MODELS.get(section.name or "", factory))
    for name, size in sizes.items():
        if name not in section.kwargs and defaults.get(name, size) != size:
            config = with_overrides(config, {f"model.kwargs.{name}": size})
    return config, make_model(factory, kwargs=config.model.kwargs, seed=config.seed)


def _ddp_options(config: Config) -> JsonObject:
    """Options of `DataParallel`, with the objects that the config names."""
    ddp = config.ddp
    hook = _hook(ddp.reduction.hook)
    norm: str | options.SyncBatchNorm = ddp.batch_norm.name
    if norm == "sync":
        norm = options.SyncBatchNorm(**ddp.batch_norm.model_dump())
    objects = {
        "strategy": _strategy(ddp.strategy),
        "reduction": options.Reduction(hook=hook, **ddp.reduction.model_dump(exclude={"hook"})),
        "batch_norm": norm,
        "precision": options.Precision(**ddp.precision.model_dump()),
    }
    return ddp.model_dump(exclude={*objects}) | objects


def _hook(section: options.CommHookConfig) -> CommHook | None:
    key = "ddp.reduction.hook"
    make = names.named(section, key, COMM_HOOKS, "hook")
    make = names.resolve_target(make, key=key) if isinstance(make, str) else make
    names.check_arguments(make, section.kwargs, key=f"{key}.kwargs")
    hook = make(**section.kwargs)
    if make is not mean and not isinstance(hook, CommHook):
        raise _wrong(section, key, hook, "a jddp.CommHook")
    return hook


def _wrong(section: options.NamedSection, key: str, found: object, wanted: str) -> ConfigError:
    """The error for a target that returns another kind of object."""
    given = f"{key}.target: {section.target} returns {type(found).__name__}."
    return ConfigError(f"{given} It must return {wanted}.")


def find_loss(config: Config, source: DataSource | None = None) -> LossFn:
    """The loss that a config names, with the bytes of a token, if the source knows them."""
    loss = config.loss
    found = names.named(loss, "loss", LOSSES, "loss")
    kwargs = dict(loss.kwargs)
    if found is next_token and source is not None and source.bytes_per_token is not None:
        kwargs = {"bytes_per_token": source.bytes_per_token, **kwargs}
    return _with_arguments(found, kwargs, "loss.target", "loss.kwargs")


def num_classes_of(config: Config, data: DataSet) -> int:
    """The smallest number of classes that covers the labels; 0 if there are none at hand.

    Raises:
      DataError: If a label that counts is negative.
    """
    if config.loss.name != "cross_entropy":
        return 0
    highest = _highest_label("train", data.train)
    if config.loss.eval_target is None:
        highest = max(highest, _highest_label("test", data.test))
    return highest + 1


def _highest_label(part: str, examples: Examples) -> int:
    """The highest label of the examples whose mask is not 0; -1 for none."""
    labels = column_of(examples, "label")
    if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1:
        return -1
    mask = column_of(examples, "mask")
    if mask is not None:
        labels = labels[(mask > 0).reshape(len(mask), -1).any(1)]
    if num_wrong := int((labels < 0).sum()):
        raise DataError(
            f"{part}: {num_wrong:,} labels are negative, such as {labels.min()}. Classes count "
            "from 0: leave such examples out, or give all a 'mask', with 0 for these."
        )
    return int(labels.max(initial=0)) if len(labels) else -1


def find_eval_fn(config: Config) -> LossFn | None:
    """The function for evaluation that a config names; None where it evaluates by its loss."""
    target, key = config.loss.eval_target, "loss.eval_target"
    if target is None:
        return None
    found = names.resolve_target(target, key=key)
    return _with_arguments(found, {}, key, key)


def _with_arguments(function: LossFn, kwargs: Settings, key: str, kwargs_key: str) -> LossFn:
    """A loss with its arguments filled in, which are checked."""
    filled = names.accepted_names(function, key=key) - kwargs.keys()  # model, batch, train
    names.check_arguments(function, kwargs, key=kwargs_key, filled=filled)
    return functools.partial(function, **kwargs) if kwargs else function


def _strategy(section: options.StrategyConfig) -> str | Strategy:
    match section.name:
        case "local_steps":
            outer, key = section.outer, "ddp.strategy.outer"
            made = names.named(outer, key)
            optimizer, _ = optimizers.make_optimizer(
                made, schedule=lambda step: 1.0, kwargs=outer.kwargs, key=key
            )
            return LocalSteps(section.every or 0, optimizer, section.start)
        case "fsdp":
            return FSDP(section.regather, section.group_size)
        case "logical_replicas":
            make: Callable[[int], Strategy] = tool("logical-replicas", "strategy: logical_replicas")
            return make(section.number or 0)
    return section.name


CALLBACKS: dict[str, Callable[..., Callback]] = {
    "early_stopping": EarlyStopping,
    "keep_best": KeepBest,
}
Make = Callable[[], Callback]


def find_callbacks(config: Config) -> list[Make]:
    """Functions that make the callbacks that a config lists, with checked arguments.

    Raises:
      ConfigError: If a name or a target is unknown, or an argument is.
    """
    found = list[Make]()
    for i, section in enumerate(config.callbacks):
        key = f"callbacks[{i}]"
        make = names.named(section, key, CALLBACKS | dict(added(ADDED_CALLBACKS)), "callback")
        names.check_arguments(make, section.kwargs, key=f"{key}.kwargs")
        found.append(functools.partial(make, **section.kwargs))
    return found


def make_callbacks(config: Config) -> list[Callback]:
    """The callbacks of a run, new ones.

    Raises:
      ConfigError: As `find_callbacks`, or if an argument breaks a rule of the callback.
    """
    metric = config.checkpoint.best_metric
    made = [] if metric is None else [KeepBest(metric)]
    return [*made, *(make() for make in find_callbacks(config))]
