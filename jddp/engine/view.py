"""How much of the mean gradient a replica holds.

WholeMean      all of it, the same on every replica
ShardOfMean    its shard
PartsOfMean    its parts of divided parameters, and all of the others
OwnGradient    a gradient of its own
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

from jddp.reduce.shards import Groups, own_shard, whole
from jddp.typing import Grads, PyTree


@dataclasses.dataclass(frozen=True)
class WholeMean:
    """All of the mean gradient, on every replica: nothing needs to be sent.

    Attributes:
      axis: Name of the axis of the replicas.
    """

    axis: str
    differs = False

    def norm(self, grads: Grads) -> Float[Array, ""]:
        """Returns the norm, which is the same on every replica."""
        return optax.tree.norm(grads)

    def metric(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the number, which is the same on every replica."""
        return x

    def shards(self, grads: Grads) -> Grads:
        """Cuts the replica's shard out of the whole."""
        return own_shards(grads, self.axis)

    def whole(self, grads: Grads, gather: Callable[[Grads], Grads]) -> Grads:
        """Returns the gradient as it is."""
        return grads


@dataclasses.dataclass(frozen=True)
class ShardOfMean(WholeMean):
    """The replica's shard of the mean gradient."""

    differs = True

    def norm(self, grads: Grads) -> Float[Array, ""]:
        """Returns the norm over the shards of all replicas."""
        with jax.named_scope("metrics"):
            # Squares are added, and the root is taken of their sum. Zeros that pad shards add
            # nothing.
            return jnp.sqrt(lax.psum(optax.tree.norm(grads, squared=True), self.axis))

    def shards(self, grads: Grads) -> Grads:
        """Returns the shard as it is."""
        return grads

    def whole(self, grads: Grads, gather: Callable[[Grads], Grads]) -> Grads:
        """Gathers the shards of all replicas."""
        return gather(grads)


@final
@dataclasses.dataclass(frozen=True)
class PartsOfMean(ShardOfMean):
    """The replica's parts of the mean gradient of divided parameters, and all of the others.

    Attributes:
      dims: Dims along which gradients are divided, leaf by leaf; None for one that is whole.
      groups: Groups of replicas, each of which has all parts.
    """

    dims: tuple[int | None, ...]
    groups: Groups

    def norm(self, grads: Grads) -> Float[Array, ""]:
        """Returns the norm over the parts of all replicas."""
        leaves = jax.tree.leaves(grads)
        parts = [x for x, dim in zip(leaves, self.dims, strict=True) if dim is not None]
        others = [x for x, dim in zip(leaves, self.dims, strict=True) if dim is None]
        with jax.named_scope("metrics"):
            squares = lax.psum(optax.tree.norm(parts, squared=True), self.axis)
            if self.groups.num > 1:
                # Each has every part; a sum over one group alone might round as in no other.
                squares /= self.groups.num
            return jnp.sqrt(squares + optax.tree.norm(others, squared=True))

    def whole(self, grads: Grads, gather: Callable[[Grads], Grads]) -> Grads:
        """Gathers the parts of all replicas, leaf by leaf."""
        leaves, treedef = jax.tree.flatten(grads)
        join = functools.partial(whole, axis=self.axis, groups=self.groups)
        return jax.tree.unflatten(treedef, map(join, leaves, self.dims))


@final
@dataclasses.dataclass(frozen=True)
class OwnGradient(WholeMean):
    """All of the replica's own gradient, which is no mean: replicas take local steps."""

    differs = True

    def metric(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the mean over the replicas."""
        with jax.named_scope("metrics"):
            # For the report alone: each replica clips by its own norm, and metrics must leave the
            # step the same on all of them.
            return lax.pmean(x, self.axis)


def own_shards(tree: PyTree, axis: str) -> PyTree:
    """Returns this replica's shards of arrays that it has as a whole."""
    return jax.tree.map(functools.partial(own_shard, axis=axis), tree)
