"""Optimizers for groups of parameters, and rates that fall from layer to layer.

    optimizer = by_group({"head": ParameterGroup(["head/.*"], optax.sgd(0.1))}, optax.adamw(1e-4))
    optimizer = decay_by_layer(optimizer, ["embed.*", "block_([0-9]+)/.*"], 0.75)

Both are optimizers of optax, so that every part of a step treats them as any other.

References:
  Clark et al., "ELECTRA", ICLR 2020, for layer-wise rates. https://arxiv.org/abs/2003.10555
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jddp.ground.errors import ConfigError
from jddp.ground.names import match_paths
from jddp.ground.typing import Grads, Params, PyTree

REST = "rest"  # label of the parameters of no group


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
    """Returns an optimizer with one for each group, and one for the rest.

    Args:
      groups: Groups by name. A parameter belongs to the first group with a pattern that matches
        its path.
      rest: The optimizer of all other parameters.

    Raises:
      ConfigError: If a group is named as the rest is; and when the optimizer is initialized, if a
        pattern matches no parameter.
    """
    if REST in groups:
        raise ConfigError(f"optimizer.groups.{REST} is all that no group matches. Rename it.")
    transforms = {name: group.optimizer for name, group in groups.items()}
    labels = functools.partial(groups_of, {name: x.patterns for name, x in groups.items()})
    return optax.partition({**transforms, REST: rest}, lambda params: _by_path(labels, params))


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
        found |= dict.fromkeys(
            match_paths(chosen, paths, key=f"optimizer.groups.{name}.patterns"), name
        )
    return found


def decay_by_layer(
    optimizer: optax.GradientTransformation, layers: Sequence[str], factor: float
) -> optax.GradientTransformation:
    """Returns an optimizer whose updates are smaller from each layer to the next below it.

    Args:
      optimizer: Any optimizer.
      layers: Patterns as of `scales_of`.
      factor: Rate of each layer, divided by the rate of the layer above it.

    Raises:
      ConfigError: When it is initialized, if a pattern matches no parameter.
    """
    scales = functools.partial(scales_of, layers, factor)

    def init(params: Params) -> optax.EmptyState:
        scales(paths_of(params))
        return optax.EmptyState()

    def update(updates: Grads, state: PyTree, params: Params = None) -> tuple[Grads, PyTree]:
        return jax.tree.map(operator.mul, updates, _by_path(scales, updates)), state

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def scales_of(layers: Sequence[str], factor: float, paths: Sequence[str]) -> dict[str, float]:
    """Returns the factor of the rate of each parameter, by path.

    Args:
      layers: Regular expressions for whole paths, from the lowest layer upwards. One with a number
        in parentheses, `block_([0-9]+)/.*`, is a layer for each number that it finds. Parameters
        that none matches are the highest layer, whose factor is 1.
      factor: Rate of each layer, divided by the rate of the layer above it.
      paths: Paths of all parameters.

    Raises:
      ConfigError: If a pattern matches no parameter, or its parentheses no number.
    """
    key = "optimizer.layer_decay.layers"
    layer_of = dict[str, tuple[int, int]]()
    for row, pattern in reversed([*enumerate(layers)]):
        for path, match in match_paths([pattern], paths, key=key).items():
            number = "".join(match.groups(default="")) or "0"
            if not number.isdecimal():
                raise ConfigError(f"{key}: {pattern!r} finds {number!r} in {path}, and no number.")
            layer_of[path] = (row, int(number))
    order = sorted({*layer_of.values()})
    depth_of = {path: len(order) - order.index(layer) for path, layer in layer_of.items()}
    return {path: factor ** depth_of.get(path, 0) for path in paths}


def paths_of(params: Params) -> list[str]:
    """Returns the paths of all parameters, such as "backbone/Dense_0/kernel"."""
    leaves = jax.tree.leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def _by_path(rule: Callable[[list[str]], Mapping[str, Any]], params: Params) -> PyTree:
    """The value that a rule gives each parameter by its path, as a tree."""
    paths = paths_of(params)
    return jax.tree.unflatten(jax.tree.structure(params), map(rule(paths).__getitem__, paths))
