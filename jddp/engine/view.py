"""The view of one replica on the mean gradient, and clipping, which needs the norm of the whole.

    View     all of it, the same on every replica
    Shard    its shard
    Own      a gradient of its own

A number that is computed from the gradient and must be the same on every replica, such as its norm,
is taken by the view.

    grads, metrics = clip(grads, view)
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from jddp.engine.state import widened
from jddp.errors import ConfigError
from jddp.reduce.shards import own_shard
from jddp.typing import Grads, Metrics


@dataclasses.dataclass(frozen=True)
class View:
    """All of the mean gradient, on every replica: nothing needs to be sent.

    Attributes:
      axis: Name of the axis of the replicas.
    """

    axis: str
    differs = False  # Whether replicas hold different numbers.

    def norm(self, grads: Grads) -> Float[Array, ""]:
        """Returns the global norm of the gradient that the replica updates by."""
        return optax.tree.norm(grads)

    def metric(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the number to report for all replicas, from what each computed."""
        return x

    def shards(self, grads: Grads) -> Grads:
        """Returns the replica's shard of the gradient."""
        return jax.tree.map(functools.partial(own_shard, axis=self.axis), grads)

    def whole(self, grads: Grads, gather: Callable[[Grads], Grads]) -> Grads:
        """Returns the whole gradient; `gather` makes it of the shards of all replicas."""
        return grads


class Shard(View):
    """The replica's shard of the mean gradient."""

    differs = True

    def norm(self, grads: Grads) -> Float[Array, ""]:
        """Returns the norm over the shards of all replicas."""
        with jax.named_scope("metrics"):
            # Squares are added, and the root is taken of their sum. Zeros that pad shards add
            # nothing.
            return jnp.sqrt(lax.psum(optax.tree.norm(grads, squared=True), self.axis))

    def shards(self, grads: Grads) -> Grads:
        """As `View.shards`."""
        return grads

    def whole(self, grads: Grads, gather: Callable[[Grads], Grads]) -> Grads:
        """As `View.whole`."""
        return gather(grads)


class Own(View):
    """The replica's own gradient, which is no mean: replicas take local steps."""

    differs = True

    def metric(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the mean over the replicas."""
        with jax.named_scope("metrics"):
            # For the report alone: each replica clips by its own norm, and metrics must leave the
            # step the same on all of them.
            return lax.pmean(x, self.axis)


Clip = Callable[[Grads, View], tuple[Grads, Metrics]]


def no_clip(grads: Grads, view: View) -> tuple[Grads, Metrics]:
    """Returns the gradients as they are, and no metric."""
    return grads, {}


def clip_by_global_norm(grads: Grads, view: View, *, limit: float) -> tuple[Grads, Metrics]:
    """Scales gradients down to a global norm, as optax's function of this name does.

    Returns:
      The clipped gradients, and "grad_norm": their norm before.
    """
    # In float32, since the squares of a norm of 256 overflow float16.
    exact = widened(grads)
    norm = view.norm(exact)
    # The operations of optax's own clipping, so that results equal those of one device.
    clipped = jax.tree.map(
        lambda x: jnp.where(norm < limit, x, x / norm.astype(x.dtype) * limit), exact
    )
    return optax.tree.cast_like(clipped, grads), {"grad_norm": view.metric(norm)}


def choose_clip(limit: float | None) -> Clip:
    """Returns the clipping to this global norm.

    Raises:
      ConfigError: If it is not positive.
    """
    if limit is None:
        return no_clip
    if not limit > 0:
        raise ConfigError(f"max_grad_norm is positive, or None; got {limit}.")
    return functools.partial(clip_by_global_norm, limit=limit)
