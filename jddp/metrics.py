"""Losses and metrics as sums and counts, so that a mean stays exact however shares differ.

A mean of means is wrong as soon as replicas hold different numbers of valid entries. Here every
quantity travels as (total, count): totals and counts of all of them are added over the replicas
in one small vector, and divided once.

    sums = weigh(losses, {"accuracy": hits}, mask=batch["mask"])   # per replica
    sums = sum_over_replicas(sums, axis="data")                    # the same on every replica
    accuracy = mean(sums["accuracy"].total, sums["accuracy"].count)
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jddp.errors import ConfigError

RESERVED = ("loss", "count", "grad_norm", "examples")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A weighted sum and the sum of its weights; their quotient is the mean.

    Attributes:
      total: Scalar.
      count: Scalar.
      is_scalar: Whether replicas gave one mean each, which no mask can correct.
      num_entries: How many entries there are, masked ones counted.
    """

    total: Any
    count: Any
    is_scalar: bool = dataclasses.field(default=False, metadata={"static": True})
    num_entries: int = dataclasses.field(default=1, metadata={"static": True})


Sums = dict[str, Sum]


def weigh(
    losses: Array,
    metrics: Mapping[str, Array],
    *,
    mask: Array | None = None,
    scalar_count: float = 1.0,
) -> Sums:
    """Sums the losses and metrics of one replica over their valid entries.

    Args:
      losses: Any shape whose first dim is b, or a scalar: this replica's mean.
      metrics: By name; shapes as for `losses`.
      mask: 1 where an entry counts and 0 where it does not; aligned with the leading dims of
        `losses` and of each metric. A metric with fewer dims than the mask counts where its row
        has any valid entry.
      scalar_count: What a scalar counts for, against other replicas and batches.

    Returns:
      "loss" and each metric, in float32.

    Raises:
      ConfigError: If a shape does not align with the mask, or a metric has a reserved name.
    """
    taken = sorted(set(metrics) & set(RESERVED))
    if taken:
        raise ConfigError(f"Metric name {taken[0]!r} is jddp's own. Rename the metric.")
    named = {"loss": losses, **metrics}
    return {name: _sum(name, x, mask, scalar_count) for name, x in named.items()}


def _sum(name: str, values: Array, mask: Array | None, scalar_count: float) -> Sum:
    values = jnp.asarray(values).astype(jnp.float32)
    if values.ndim == 0:
        return Sum(values * scalar_count, jnp.float32(scalar_count), is_scalar=True)
    if mask is None:
        return Sum(values.sum(), jnp.float32(values.size), num_entries=values.size)
    weights = _align(name, values.shape, mask)
    # `where` keeps a NaN of an invalid entry out of the sum; 0 * NaN would not.
    total = jnp.where(weights > 0, values * weights, 0.0).sum()
    return Sum(total, weights.sum(), num_entries=values.size)


def _align(name: str, shape: tuple[int, ...], mask: Array) -> Array:
    weights = mask.astype(jnp.float32)
    if weights.ndim > len(shape):
        weights = weights.max(axis=tuple(range(len(shape), weights.ndim)))
    if weights.shape != shape[: weights.ndim]:
        raise ConfigError(
            f"{name!r} has shape {shape}, and batch['mask'] has shape {mask.shape}: the mask must "
            "equal the leading dims. Return one value per masked entry, or per row."
        )
    dims = tuple(range(weights.ndim, len(shape)))
    return jnp.broadcast_to(jnp.expand_dims(weights, dims), shape)


def count_rows(mask: Array) -> Float[Array, ""]:
    """Number of rows with any valid entry."""
    rows = mask.reshape(mask.shape[0], -1).astype(jnp.float32)
    return (rows.max(axis=1) > 0).astype(jnp.float32).sum()


def sum_over_replicas(sums: Sums, *, axis: str) -> Sums:
    """Adds totals and counts over `axis`: one all-reduce of one small vector."""
    leaves, treedef = jax.tree.flatten(sums)
    with jax.named_scope("metrics"):
        return jax.tree.unflatten(treedef, list(lax.psum(jnp.stack(leaves), axis)))


def mean(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """Divides a total by its count; nothing valid gives zero."""
    return total / jnp.where(count == 0, 1.0, count)


def mean_tree(totals: Any, count: Float[Array, ""]) -> Any:
    """Divides a tree of totals by one count, leaf dtypes kept; nothing valid gives zero.

    One division, then a product per element, which costs a fraction of a division: the same where
    the count is a power of two, else to rounding.
    """
    inverse = mean(jnp.ones_like(count), count)

    def scale(leaf: Array) -> Array:
        exact = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        return (exact * inverse.astype(exact.real.dtype)).astype(leaf.dtype)

    return jax.tree.map(scale, totals)


class Totals:
    """Sums of many batches, added up on the host in float64: counts stay whole numbers."""

    def __init__(self) -> None:
        self._totals: dict[str, np.ndarray] = {}

    def add(self, sums: Sums) -> None:
        """Adds one batch; waits for the device."""
        for name, x in jax.device_get(sums).items():
            pair = np.array([x.total, x.count], np.float64)
            self._totals[name] = self._totals.get(name, 0.0) + pair

    def means(self) -> dict[str, float]:
        """The means over all entries; NaN where none was valid. "examples" is a number of rows."""
        means = {
            name: float(total / count) if count else math.nan
            for name, (total, count) in self._totals.items()
        }
        if "examples" in self._totals:
            means["examples"] = int(self._totals["examples"][0])
        return means
