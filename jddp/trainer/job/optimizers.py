r"""The optimizer of a config, with its groups and layers, and the length that its schedule follows.

optimizer, schedule = optimizer_of(config, num_steps=1000)
print("\n".join(optimizer_table(config, state)))
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jddp.config.options import Section
from jddp.config.schema import Config
from jddp.data import count_steps
from jddp.data.periods import Epochs
from jddp.engine.state import TrainState
from jddp.ground.names import name_of_callable, named
from jddp.ground.typing import JsonObject
from jddp.modules.base import COLLECTION
from jddp.zoo.optimizers import (
    REST,
    ParameterGroup,
    Transformation,
    by_group,
    factory_of,
    groups_of,
    hold_peak,
    make_optimizer,
    make_schedule,
    paths_of,
)

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
) -> tuple[Transformation, Schedule | None]:
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
        rate = make_schedule(**section.schedule.model_dump(), learning_rate=peak, **length)
        if at_peak:
            rate = hold_peak(rate, max(num_steps, section.warmup_steps + 1))
        made[name] = make_optimizer(factory, schedule=rate, kwargs=kwargs, key=key)
    optimizer, rate = made[REST]
    if section.groups:
        groups = {n: ParameterGroup(section.groups[n].patterns, made[n][0]) for n in section.groups}
        optimizer = by_group(groups, optimizer)
    return optimizer, rate


def optimizer_table(config: Config, state: TrainState) -> Iterator[str]:
    """A line for each parameter: its peak rate, optimizer and group.

    Empty where all parameters are trained with the same settings.
    """
    section = config.optimizer
    specs = _specs(config)
    frozen = paths_of(state.model_state.get(COLLECTION, {}))
    if not (section.groups or frozen):
        return
    paths = paths_of(state.params)
    groups = groups_of({name: x.patterns for name, x in section.groups.items()}, paths)
    yield f"{'peak rate':>10}  {'optimizer':12} {'group':12} parameter"
    for path in paths:
        spec = specs[groups[path]]
        rate = spec.kwargs.get("learning_rate", spec.learning_rate)
        yield f"{rate:10.4g}  {name_of_callable(spec.factory):12} {groups[path]:12} {path}"
    for path in frozen:
        yield f"{'frozen':>10} {'':26}{path}"


def _specs(config: Config) -> dict[str, OptimizerSpec]:
    """The optimizer of each group, and the optimizer of the other parameters."""
    section = config.optimizer
    first = factory_of(named(section, "optimizer"), key="optimizer")
    specs = {REST: OptimizerSpec(first, section.learning_rate, section.kwargs, "optimizer")}
    for name, group in section.groups.items():
        key = f"optimizer.groups.{name}"
        own = factory_of(named(group, key), key=key) if group.name or group.target else first
        kwargs = {**(section.kwargs if own is first else {}), **group.kwargs}
        specs[name] = OptimizerSpec(own, group.learning_rate or section.learning_rate, kwargs, key)
    return specs  # `by_group` refuses a group with the name of the rest.


def period_of(section: Section, prefix: str = "") -> int | Epochs | None:
    """The period that a section has in steps or in epochs; None where it has neither.

    Args:
      section: A section of a config.
      prefix: Beginning of the two keys, such as "eval_".
    """
    epochs = getattr(section, f"{prefix}every_epochs")
    every: int | None = getattr(section, f"{prefix}every_steps")
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
