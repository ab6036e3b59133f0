"""Parameters that no gradient reaches: `unused_parameters`.

    Zero      the optimizer gets zeros for them
    Skip      they and their optimizer state stay as they are, whatever the optimizer is
    Refuse    they are refused

An optimizer moves a parameter also when its gradient is zero, by weight decay or momentum. Its
state holds trees of the same form as the parameters; so an array that belongs to a parameter is
known by its path, which ends in that of the parameter.
"""

from collections.abc import Collection, Mapping
from typing import final

import jax
import jax.numpy as jnp

from jddp.engine.protocols import Unused
from jddp.engine.state import name_of
from jddp.errors import ConfigError
from jddp.reduce.plan import BucketPlan
from jddp.typing import Leaf, Params, Path, PyTree


class Zero:
    """The optimizer gets zeros for unused parameters."""

    def check(self, plan: BucketPlan) -> None:
        """Refuses nothing."""

    def __call__(self, new: PyTree, old: PyTree, params: Params, plan: BucketPlan) -> PyTree:
        """Keeps the whole update."""
        return new


@final
class Skip(Zero):
    """Unused parameters are left alone."""

    def __call__(self, new: PyTree, old: PyTree, params: Params, plan: BucketPlan) -> PyTree:
        """Takes the update of unused parameters back; see `take_back`."""
        return take_back(new, old, params, plan.unused) if plan.unused else new


@final
class Refuse(Zero):
    """Unused parameters are refused."""

    def check(self, plan: BucketPlan) -> None:
        """Refuses a plan with unused parameters.

        Raises:
          ConfigError: If there are any, with their names.
        """
        if plan.unused:
            raise ConfigError(
                f"No gradient reaches {', '.join(plan.unused)}. Use them in the loss, or "
                "choose unused_parameters='zero' or 'skip'."
            )


UNUSED: dict[str, type[Unused]] = {"zero": Zero, "skip": Skip, "error": Refuse}


def take_back(new: PyTree, old: PyTree, params: Params, unused: Collection[str]) -> PyTree:
    """Returns `new`, but with the arrays of `old` that belong to unused parameters.

    Args:
      new: Trees with all or part of the form of the parameters, such as an optimizer's state.
      old: The same trees before the optimizer's update.
      params: The parameters, for their paths.
      unused: Names of parameters, as in `BucketPlan.unused`.

    Raises:
      ConfigError: If an array holds all parameters together.
    """
    num_all = sum(x.size for x in jax.tree.leaves(params))
    names = {
        _entries(path): name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }

    def choose(path: Path, after: Leaf, before: Leaf) -> Leaf:
        owner = _owner(_entries(path), names)
        # An optimizer that flattens all parameters into one vector, such as `optax.flatten`, leaves
        # no array that belongs to one of them.
        if owner is None and jnp.size(after) >= num_all > 1:
            raise ConfigError(
                "unused_parameters='skip': this optimizer keeps an array of all parameters at "
                f"{name_of(path)!r}, of which none can be left alone. Choose 'zero' or 'error'."
            )
        return before if owner in unused else after

    return jax.tree_util.tree_map_with_path(choose, new, old)


def _entries(path: Path) -> tuple[str, ...]:
    # A parameter of the name "count" is in a dict, an optimizer's own is a field: ".count".
    return tuple(
        ("." if isinstance(entry, jax.tree_util.GetAttrKey) else "")
        + jax.tree_util.keystr((entry,), simple=True)
        for entry in path
    )


def _owner(path: tuple[str, ...], names: Mapping[tuple[str, ...], str]) -> str | None:
    """The name of the longest parameter path that `path` ends in, numbers behind it aside.

    Behind it are numbers where an optimizer keeps a list of arrays for each parameter.
    """
    # The longest first: in nested dicts one parameter's path may end in that of another.
    for start in range(len(path)):
        for end in range(len(path), start, -1):
            if path[start:end] in names:
                return names[path[start:end]]
            if not path[end - 1].isdigit():
                break
    return None
