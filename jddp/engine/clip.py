"""Clipping of the mean gradient, which needs the norm of the whole.

NoClip              none
ClipByGlobalNorm    to a global norm
"""

import dataclasses
from typing import final

import jax
import jax.numpy as jnp
import optax

from jddp.engine.protocols import Clip, View
from jddp.engine.state import widened
from jddp.errors import ConfigError
from jddp.typing import Grads, Metrics


@final
@dataclasses.dataclass(frozen=True)
class NoClip:
    """Leaves gradients as they are."""

    def __call__(self, grads: Grads, view: View) -> tuple[Grads, Metrics]:
        """Returns the gradients, and no metric."""
        return grads, {}


@final
@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm:
    """Scales gradients down to a global norm, as optax's function of this name does.

    Attributes:
      limit: The largest norm.
    """

    limit: float

    def __call__(self, grads: Grads, view: View) -> tuple[Grads, Metrics]:
        """Returns the clipped gradients, and "grad_norm": their norm before."""
        # In float32, since the squares of a norm of 256 overflow float16.
        exact = widened(grads)
        norm = view.norm(exact)
        limit = self.limit
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
        return NoClip()
    if not limit > 0:
        raise ConfigError(f"max_grad_norm is positive, or None; got {limit}.")
    return ClipByGlobalNorm(limit)
