"""Optimizers and schedules of optax, made from their names and arguments.

    schedule = make_schedule("cosine_decay_schedule", learning_rate=0.1, num_steps=1000, kwargs={})
    optimizer, schedule = make_optimizer("adamw", schedule=schedule, kwargs={"weight_decay": 0.05})

There is no table of optimizers here: names are looked up in optax (`contrib.muon` too), and
arguments are checked against signatures, so new functions of optax work at once. The signature also
decides which defaults a function gets: the rate, the length of the schedule, and a mask that
excludes norms and biases from weight decay.

Groups of parameters may have optimizers of their own; the result is an optimizer of optax:

    optimizer = by_group({"head": ParameterGroup(["head/.*"], optax.sgd(0.1))}, optax.adamw(1e-4))

This module knows optax and nothing of steps, replicas or configs.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jddp.ground import names
from jddp.ground.errors import ConfigError
from jddp.ground.names import find_attribute
from jddp.ground.typing import Params, Path, PyTree

Arguments = Mapping[str, object]
Transformation = optax.GradientTransformation  # Name for modules that do not import optax.
NOTHING: Arguments = MappingProxyType({})
PEAK_NAMES = ("peak_value", "value", "init_value")  # The first that a schedule has is the peak.
LENGTH_NAMES = ("decay_steps", "transition_steps")
MASK_NAMES = ("mask", "weight_decay_mask")
UNDECAYED_NAMES = ("bias", "scale")


def make_schedule(
    name: str, *, learning_rate: float, num_steps: int, warmup_steps: int = 0, kwargs: Arguments
) -> optax.Schedule:
    """Returns the learning rate as a function of the step.

    The rate rises in a straight line from 0 over `warmup_steps`, then follows `optax.<name>` from
    its step 0. A schedule with its own warm-up (an argument `warmup_steps`) gets `warmup_steps`.

    Args:
      name: A function of optax, e.g. "cosine_decay_schedule".
      learning_rate: Peak rate, passed under the name that the schedule has for it.
      num_steps: Steps of the run; a schedule with a length gets the steps after warm-up.
      warmup_steps: Steps of warm-up. A run shorter than this never reaches the peak.
      kwargs: Arguments of the schedule, which have precedence over defaults.

    Raises:
      ConfigError: If optax has no such schedule, or it does not take these arguments.
    """
    key = "optimizer.schedule"
    factory = find_attribute(optax, name, called="optax", key=f"{key}.name", ending="_schedule")
    accepted = names.accepted_names(factory, key=f"{key}.name")
    warms_up = "warmup_steps" in accepted
    length = num_steps - warmup_steps
    filled = dict[str, object]()
    if warms_up:  # Optax counts the warm-up as a part of the length, and it must be shorter.
        own = kwargs.get("warmup_steps", warmup_steps)
        length = max(num_steps, own + 1) if isinstance(own, int) else num_steps
        # Without warm-up, warmup_constant_schedule stays at its first value for good.
        filled = {"init_value": 0.0 if own else learning_rate, "warmup_steps": warmup_steps}
    filled |= dict.fromkeys([n for n in PEAK_NAMES if n in accepted][:1], learning_rate)
    filled |= dict.fromkeys(LENGTH_NAMES, max(1, length))
    arguments = {n: v for n, v in filled.items() if n in accepted} | dict(kwargs)
    schedule = _call(factory, arguments, key=f"{key}.kwargs")
    if not callable(schedule):
        raise ConfigError(f"{key}.name: optax.{name} is no schedule: it returns {schedule!r}.")
    if warmup_steps and not warms_up:
        warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
        return optax.join_schedules([warmup, schedule], [warmup_steps])
    return schedule


def hold_peak(schedule: optax.Schedule, num_steps: int) -> optax.Schedule:
    """Returns a constant schedule at the highest rate of the first steps of `schedule`."""
    rates = jax.vmap(schedule)(jnp.arange(num_steps))
    return optax.constant_schedule(float(jnp.max(rates)))


def make_optimizer(
    factory: str | Callable[..., object],
    *,
    schedule: optax.Schedule,
    kwargs: Arguments = NOTHING,
    key: str = "optimizer",
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """Returns an optimizer, and the schedule that it follows.

    Args:
      factory: Name of an optimizer of optax, or a callable that returns a transformation.
      schedule: Learning rate, passed to a factory that has an argument `learning_rate`.
      kwargs: Arguments of the factory, which have precedence over defaults. A factory that takes
        `mask` or `weight_decay_mask` is given `decay_mask`; None decays norms and biases too.
      key: The section of the config, for errors.

    Returns:
      The transformation; and `schedule`, or None if the factory takes no learning rate.

    Raises:
      ConfigError: If optax has no such optimizer, or it does not take these arguments.
    """
    make = factory_of(factory, key=key)
    accepted = names.accepted_names(make, key=key)
    filled: dict[str, object] = {"learning_rate": schedule, **dict.fromkeys(MASK_NAMES, decay_mask)}
    arguments = {n: v for n, v in filled.items() if n in accepted} | dict(kwargs)
    optimizer = _call(make, arguments, key=f"{key}.kwargs")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"{key}: {names.name_of_callable(make)} gives {type(optimizer).__name__}, no optimizer."
        )
    return optimizer, schedule if arguments.get("learning_rate") is schedule else None


def factory_of(factory: str | Callable[..., object], *, key: str) -> Callable[..., object]:
    """Returns the function that makes an optimizer; a name stands for optax's function.

    Raises:
      ConfigError: If optax has no such name.
    """
    if not isinstance(factory, str):
        return factory
    found: Callable[..., object] = find_attribute(optax, factory, called="optax", key=f"{key}.name")
    return found


def decay_mask(params: Params) -> PyTree:
    """Returns a tree that is True for leaves with weight decay: not for norms, biases and scalars.

    A leaf is excluded if it has at most one dim or is named "bias" or "scale", as Flax names
    them. (Under a scan over layers they have two dims.)
    """

    def is_decayed(path: Path, leaf: jax.Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return jnp.ndim(leaf) > 1 and name not in UNDECAYED_NAMES

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _call(make: Callable[..., object], arguments: Arguments, *, key: str) -> object:
    names.check_arguments(make, arguments, key=key)
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        if not make.__module__.startswith("optax"):
            raise  # An error of your code keeps its traceback.
        raise ConfigError(f"{key}: {names.name_of_callable(make)} refuses them: {error}") from error


REST = "rest"  # Label of the parameters of no group.


class ParameterGroup(NamedTuple):
    """An optimizer, and the parameters that it updates.

    Attributes:
      patterns: Regular expressions for whole paths of parameters.
      optimizer: An optax optimizer.
    """

    patterns: Sequence[str]
    optimizer: optax.GradientTransformation


def by_group(
    groups: Mapping[str, ParameterGroup], rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns an optimizer that updates each group, and the rest, by an optimizer of its own.

    Args:
      groups: Groups by name. A parameter belongs to the first group with a pattern that matches
        its path.
      rest: The optimizer of all other parameters.

    Raises:
      ConfigError: If a group is named "rest"; and when the optimizer is initialized, if a pattern
        matches no parameter.
    """
    if REST in groups:
        raise ConfigError(f"optimizer.groups.{REST} is all that no group matches. Rename it.")
    transforms = {name: group.optimizer for name, group in groups.items()}
    patterns = {name: group.patterns for name, group in groups.items()}

    def labels(params: Params) -> PyTree:
        paths = paths_of(params)
        group_of = groups_of(patterns, paths)
        return jax.tree.unflatten(jax.tree.structure(params), [group_of[path] for path in paths])

    return optax.partition({**transforms, REST: rest}, labels)


def groups_of(patterns: Mapping[str, Sequence[str]], paths: Sequence[str]) -> dict[str, str]:
    """Returns the name of the group of each parameter, by path.

    Args:
      patterns: Patterns of each group, by its name.
      paths: Paths of all parameters.

    Raises:
      ConfigError: If a pattern matches no parameter.
    """
    found = dict.fromkeys(paths, REST)
    for name, chosen in reversed([*patterns.items()]):
        matches = names.match_paths(chosen, paths, key=f"optimizer.groups.{name}.patterns")
        found |= dict.fromkeys(matches, name)
    return found


def paths_of(params: Params) -> list[str]:
    """Returns the paths of all parameters, such as "backbone/Dense_0/kernel"."""
    leaves = jax.tree.leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
