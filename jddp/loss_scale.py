"""The loss scale: what keeps gradients of float16 arithmetic from becoming zero.

float16 has no number between 0 and 2^-24 and none above 65,504. So the backward pass starts from a
scale in place of 1, and gradients are divided by it in float32, once they are averaged. "dynamic"
looks for the largest scale that fits: it doubles after so many good steps, and halves where
gradients overflow, which is a step that is skipped.

    scale = first_loss_scale()
    scale = adjust(scale, is_finite)      # after each step

Every scale is a power of two, so that it costs no bit.

References:
  Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
  https://arxiv.org/abs/1710.03740. The numbers are those of PyTorch's `torch.amp.GradScaler`, but
  for the two ends, which it does not have.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jddp.errors import ConfigError

DYNAMIC = "dynamic"
FIRST = 2.0**16
LEAST, MOST = 1.0, 2.0**24
GROWTH_INTERVAL = 2000  # good steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """A scale, and how long it has been good.

    Attributes:
      scale: What the loss is multiplied by; a float32 scalar.
      num_good: Steps since it changed, or since one was skipped; an int32 scalar.
    """

    scale: Any
    num_good: Any


def first_loss_scale() -> LossScale:
    """What a run begins with."""
    return LossScale(jnp.float32(FIRST), jnp.int32(0))


def adjust(before: LossScale, is_finite: Array, *, interval: int = GROWTH_INTERVAL) -> LossScale:
    """The scale after a step: half, the same, or after `interval` good steps twice."""
    is_grown = is_finite & (before.num_good + 1 >= interval)
    factor = jnp.where(is_finite, jnp.where(is_grown, 2.0, 1.0), 0.5)
    return LossScale(
        scale=jnp.clip(before.scale * factor, LEAST, MOST),
        num_good=jnp.where(is_finite & ~is_grown, before.num_good + 1, 0),
    )


def check_loss_scale(given: Any) -> None:
    """Refuses what is no loss scale.

    Raises:
      ConfigError: With what it may be.
    """
    if given is None or given == DYNAMIC:
        return
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not (is_number and LEAST <= given <= MOST and math.frexp(given)[0] == 0.5):
        raise ConfigError(
            f"loss_scale is 'dynamic', a power of two from 1 to 2**24, which costs no bit, or "
            f"None; got {given!r}."
        )
