"""Mesh axes that a model names for other meshes: they are taken off, with a notice.

Models that are written to be sharded name mesh axes in the boxes of their parameters
(`nn.with_partitioning`) and in constraints on arrays (`lax.with_sharding_constraint`, which Flax
also calls for its boxes and logical names). In a replica's program every array is whole, and JAX
refuses a constraint on it, whatever axis it names.

    axes = MeshAxes()
    axes.report(specs)               # of boxes
    with axes.left_out(): ...        # constraints return their arrays as they are

JAX has no interceptor for constraints. So the function `jax.lax.with_sharding_constraint` is
replaced once, when the first model is run, by one that calls it, except in a thread and context
where constraints are left out.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from jddp.typing import PyTree

log = logging.getLogger("jddp")

# The specs of constraints that are left out; None where they are not.
_LEFT_OUT: ContextVar[list[Any] | None] = ContextVar("left_out", default=None)


class MeshAxes:
    """The axes that one model names; each is reported once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, named: Iterable[Any]) -> None:
        """Warns of axes that have not been reported, in specs or tuples of names.

        Where constraints are left out, it does so at the end of that, with the axes of those.
        """
        if (left_out := _LEFT_OUT.get()) is not None:
            left_out += named
            return
        specs = [spec for spec in named if isinstance(spec, tuple | list | jax.P)]
        axes = jax.tree.leaves([tuple(spec) for spec in specs])
        new = {axis for axis in axes if isinstance(axis, str)} - self._reported
        self._reported |= new
        if new:
            log.warning(
                "The model names the mesh axes %s. Here each device holds all parameters, and its "
                "own rows whole.",
                ", ".join(sorted(new)),
            )

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """While open, constraints on arrays are left out; reports their axes at the end."""
        _replace_constraints()
        specs: list[Any] = []
        token = _LEFT_OUT.set(specs)
        try:
            yield
        finally:
            _LEFT_OUT.reset(token)
        self.report(specs)


@functools.cache
def _replace_constraints() -> None:
    for module, name in ((jax.lax, "with_sharding_constraint"), (jax.sharding, "reshard")):
        setattr(module, name, _left_out_where_asked(getattr(module, name)))


def _left_out_where_asked(constrain: Callable[..., PyTree]) -> Callable[..., PyTree]:
    @functools.wraps(constrain)
    def constrain_or_not(x: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        left_out = _LEFT_OUT.get()
        if left_out is None:
            return constrain(x, *args, **kwargs)
        given = jax.tree.leaves((args, kwargs), is_leaf=lambda spec: isinstance(spec, jax.P))
        left_out += [getattr(sharding, "spec", sharding) for sharding in given]
        return x

    return constrain_or_not
