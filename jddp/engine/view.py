"""A replica's view of the mean gradient: how much of it the replica holds, and its clipping.

all of it            the same on every replica
its shard            with ZeRO-1
its parts            with FSDP, of divided parameters, and all of the others
its own gradient     with local steps; that is no mean
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import final

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from jddp.engine.state import widened
from jddp.ground.errors import ConfigError
from jddp.ground.typing import Grads, Metrics, PyTree
from jddp.reduce.shards import Groups, own_shard, whole

Join = Callable[[Grads], Grads]
Norm = Float[Array, ""]


@final
@dataclasses.dataclass(frozen=True)
class View:
    """How much of the mean gradient a replica holds; by default all of it.

    A number that is computed from the gradient and must be the same on every replica, such as its
    norm, is taken by the view.

    Attributes:
      axis: Name of the axis of the replicas.
      norm: Function that returns the global norm of the gradient that the replica updates by.
      whole: Function that returns the whole gradient; its second argument is a function that
        makes it of the shards of all replicas.
      is_divided: Whether the replica holds a shard or parts of it.
      is_mean: Whether it is the mean, and not a gradient of the replica's own.
    """

    axis: str
    norm: Callable[[Grads], Norm] = optax.tree.norm
    whole: Callable[[Grads, Join], Grads] = lambda grads, gather: grads
    is_divided: bool = False
    is_mean: bool = True

    @property
    def differs(self) -> bool:
        """Whether replicas hold different numbers."""
        return self.is_divided or not self.is_mean

    def metric(self, x: Norm) -> Norm:
        """Returns the number to report for all replicas, from the number that each computed."""
        if self.is_mean:
            return x
        with jax.named_scope("metrics"):
            # Only for the report: each replica clips by its own norm, and metrics must leave the
            # step equal on all replicas.
            return lax.pmean(x, self.axis)

    def shards(self, grads: Grads) -> Grads:
        """Returns the replica's shard of the gradient."""
        return grads if self.is_divided else own_shards(grads, self.axis)


def view_of_shards(axis: str) -> View:
    """Returns the view of a replica that holds its shard of the mean."""

    def norm(grads: Grads) -> Norm:
        with jax.named_scope("metrics"):
            # Squares are added, and the root is taken of their sum. Zeros that pad shards add
            # nothing.
            return jnp.sqrt(lax.psum(optax.tree.norm(grads, squared=True), axis))

    return View(axis, norm, lambda grads, gather: gather(grads), is_divided=True)


def view_of_parts(axis: str, dims: tuple[int | None, ...], groups: Groups) -> View:
    """Returns the view of a replica that holds its parts of the mean.

    Args:
      axis: Name of the axis of the replicas.
      dims: Dims along which gradients are divided, leaf by leaf; None for one that is whole.
      groups: Groups of replicas; each group has all parts.
    """

    def norm(grads: Grads) -> Norm:
        leaves = jax.tree.leaves(grads)
        parts = [x for x, dim in zip(leaves, dims, strict=True) if dim is not None]
        others = [x for x, dim in zip(leaves, dims, strict=True) if dim is None]
        with jax.named_scope("metrics"):
            squares = lax.psum(optax.tree.norm(parts, squared=True), axis)
            if groups.num > 1:
                # Each group has every part; a sum over one group alone might round in its own way.
                squares /= groups.num
            return jnp.sqrt(squares + optax.tree.norm(others, squared=True))

    def join(grads: Grads, gather: Join) -> Grads:
        leaves, treedef = jax.tree.flatten(grads)
        one = functools.partial(whole, axis=axis, groups=groups)
        return jax.tree.unflatten(treedef, map(one, leaves, dims))

    return View(axis, norm, join, is_divided=True)


def own_shards(tree: PyTree, axis: str) -> PyTree:
    """Returns this replica's shards of arrays that it has as a whole."""
    return jax.tree.map(functools.partial(own_shard, axis=axis), tree)


@final
@dataclasses.dataclass(frozen=True)
class Clip:
    """Scales gradients down to a global norm, as optax's function of this name does.

    Attributes:
      limit: The largest norm; None leaves gradients as they are.

    Raises:
      ConfigError: If the limit is not positive.
    """

    limit: float | None

    def __post_init__(self) -> None:
        """Refuses a limit that is not positive."""
        if self.limit is not None and not self.limit > 0:
            raise ConfigError(f"max_grad_norm is positive, or None; got {self.limit}.")

    def __call__(self, grads: Grads, view: View) -> tuple[Grads, Metrics]:
        """Returns the clipped gradients, and "grad_norm": their norm before."""
        limit = self.limit
        if limit is None:
            return grads, {}
        # Takes the norm in float32, since the squares of a norm of 256 overflow float16.
        exact = widened(grads)
        norm = view.norm(exact)
        # Repeats the operations of optax's own clipping, so that results equal the results of one
        # device.
        clipped = jax.tree.map(
            lambda x: jnp.where(norm < limit, x, x / norm.astype(x.dtype) * limit), exact
        )
        return optax.tree.cast_like(clipped, grads), {"grad_norm": view.metric(norm)}
