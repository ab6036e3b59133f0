"""Losses and metrics as sums and counts, so that a mean is exact for replica batches of any size.

A mean of means is wrong as soon as replicas hold different numbers of valid entries. Here every
quantity is sent as (total, count): all totals and counts are added over the replicas in one small
vector, and divided once. A loss that divides by its own count returns that count too (`Mean`). A
metric that is no mean is also computed from sums (`Metric`).

    sums = weigh(losses, {"accuracy": hits}, mask=batch["mask"])   # per replica
    sums = sum_over_replicas(sums, axis="data")                    # the same on every replica
    accuracy = divide(sums["accuracy"].total, sums["accuracy"].count)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jddp.ground.errors import ConfigError
from jddp.ground.typing import RESERVED, Batch, Tree

# Names that batches use for weights of losses.
WEIGHTS = ("mask", "loss_mask", "weight", "weights")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A loss or metric with a count of its own: its value is sum(total) / sum(count) of all rows.

        return jddp.Mean(losses * weights, weights)                # a value per row or per token
        return jddp.Mean((losses * weights).sum(), weights.sum())  # scalars for this replica's rows

    The sums are over replicas, micro-batches and batches of an evaluation. So rows weigh as much as
    on one device, for any division into replicas. The gradient is the gradient of sum(total),
    divided by sum(count): the count is not differentiated.

    Entries of arrays are left out where `batch["mask"]` is 0, and where a partial batch is padded.
    jddp cannot leave anything out of scalars: weigh them by `batch["mask"]` yourself; a padded
    batch is refused. With float16 (parameters, wire or `loss_scale`) prefer arrays: gradients of
    sums are scaled down by their number of entries, and a scalar counts as one entry per row.

    Attributes:
      total: Weighted losses: an array of shape (b, ...), or their sum.
      count: Their weights, or another divisor of the total: an array of shape (b, ...), or its
        sum. An integer, boolean or floating dtype.
    """

    total: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedMean(Mean):
    """A `Mean` whose total is a scalar that the loss has computed with `batch["mask"]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of the evaluation that is no mean, but can be computed from sums.

        {"perplexity": jddp.Metric(losses, lambda total, count: np.exp(total / count))}

    A loss returns it instead of an array. In training it is left out.

    Attributes:
      values: A tree of arrays that begin with the dims of the losses, `(b, ...)`, or have fewer.
        They are summed over those dims, where the mask is not 0, over replicas and over batches:
        whole numbers in int64, others in float32 on a device and in float64 on the host.
      compute: Function `compute(sums, count)`, called on the host. `sums` is the tree of sums, as
        numpy arrays without those dims; `count` is the number of valid entries of the tree's first
        array. It returns a number or an array.
    """

    values: Any
    compute: Callable[[Any, float], Any] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A weighted sum and the sum of its weights; their quotient is the mean.

    Attributes:
      total: Scalar, or the tree of arrays of a `Metric`, whole numbers as `_sum_whole` has them.
      count: Scalar.
      is_scalar: Whether each replica gave one mean: replicas are then weighted equally.
      is_maskable: Whether rows of padding can be left out of it.
      num_entries: Number of entries, masked entries counted.
      compute: Function of the sums, `Metric.compute`; None for the mean.
    """

    total: Any
    count: Any
    is_scalar: bool = dataclasses.field(default=False, metadata={"static": True})
    is_maskable: bool = dataclasses.field(default=True, metadata={"static": True})
    num_entries: int = dataclasses.field(default=1, metadata={"static": True})
    compute: Any = dataclasses.field(default=None, metadata={"static": True})


Sums = dict[str, Sum]


def weigh(
    losses: Array | Mean,
    metrics: Mapping[str, Array | Mean | Metric],
    *,
    mask: Array | None = None,
    num_rows: int = 1,
    train: bool = True,
) -> Sums:
    """Sums the losses and metrics of one replica over their valid entries.

    Args:
      losses: Losses of any shape whose first dim is b, a scalar (this replica's mean), or a `Mean`.
      metrics: Metrics by name, of shapes as for `losses`.
      mask: Array with 1 where an entry counts and 0 where it does not; no weights. It is aligned
        with the leading dims of `losses` and of each metric. A metric with fewer dims than the mask
        counts where its row has any valid entry.
      num_rows: Number of rows of the replica, and of the entries of a `Mean` of scalars.
      train: Whether to leave out each `Metric`. In training a scalar weighs as much on each
        replica. In evaluation batches may differ in size, and it weighs by its rows.

    Returns:
      "loss" and each metric, in float32; in float64 if the values are, under `jax_enable_x64`.

    Raises:
      ConfigError: If a shape does not align with the mask, or a metric has a reserved name.
    """
    if taken := sorted(set(metrics) & set(RESERVED)):
        raise ConfigError(
            f"Metric name {taken[0]!r} is jddp's own, as are {', '.join(RESERVED)}. Rename the "
            "metric."
        )
    leading = max(map(jnp.shape, jax.tree.leaves(losses)), key=len)
    sums = {}
    for name, x in {"loss": losses, **metrics}.items():
        if isinstance(x, Mean):
            sums[name] = _sum_mean(name, x, mask, num_rows)
        elif not isinstance(x, Metric):
            sums[name] = _sum(name, x, mask, 1.0 if train else float(num_rows))
        elif not train:
            sums[name] = _sum_tree(name, x, mask, leading)
    return sums


def _sum_mean(name: str, mean: Mean, mask: Array | None, num_rows: int) -> Sum:
    def add_up(x: jax.typing.ArrayLike) -> Array:
        x = _widened(jnp.asarray(x))
        if x.ndim and mask is not None:  # The weights are in it already.
            x = jnp.where(_align(name, x.shape, mask) > 0, x, 0.0)
        return x.sum()

    both = mean.total, mean.count
    total, count = map(add_up, both)
    is_maskable = isinstance(mean, MaskedMean) or all(jnp.ndim(x) > 0 for x in both)
    num_entries = max(num_rows, *map(jnp.size, both))
    return Sum(total, count, is_maskable=is_maskable, num_entries=num_entries)


def mask_in(batch: Batch) -> Any:
    """The entry "mask" of a batch that is a dict; None without one."""
    return batch.get("mask") if isinstance(batch, Mapping) else None


def _sum(name: str, values: Array, mask: Array | None, scalar_count: float) -> Sum:
    values = _widened(jnp.asarray(values))
    if values.ndim == 0:
        count = jnp.float32(scalar_count)
        return Sum(values * scalar_count, count, is_scalar=True, is_maskable=False)
    if mask is None:
        return Sum(values.sum(), jnp.float32(values.size), num_entries=values.size)
    weights = _align(name, values.shape, mask)
    # `where` keeps a NaN of an invalid entry out of the sum; 0 * NaN would not.
    total = jnp.where(weights > 0, values * weights, 0.0).sum()
    return Sum(total, weights.sum(), num_entries=values.size)


def _sum_tree(name: str, metric: Metric, mask: Array | None, leading: tuple[int, ...]) -> Sum:
    """Sums of a metric over the dims of the losses, or over rows; whole numbers stay whole."""

    def add_up(x: Array) -> tuple[Array, Array]:
        shape = x.shape[: len(leading) or 1]
        if leading and shape != leading[: len(shape)]:
            raise ConfigError(
                f"{name!r} has shape {x.shape}, and the losses have {leading}, over which it is "
                "summed. Begin with these dims, or return losses per row (jddp.Mean)."
            )
        weights = jnp.ones(shape) if mask is None else _align(name, shape, mask)
        counts = jnp.expand_dims(weights > 0, tuple(range(len(shape), x.ndim)))
        is_whole, dims = x.dtype.kind in "biu", tuple(range(len(shape)))
        x = jnp.where(counts, x if is_whole else _widened(x), 0)
        return _sum_whole(x, dims) if is_whole else x.sum(dims), weights.sum()

    leaves, treedef = jax.tree.flatten(metric.values)
    if not leaves or any(jnp.ndim(x) == 0 for x in leaves):
        raise ConfigError(f"{name!r} holds a scalar, or nothing. Its values need a dim for rows.")
    totals, counts = zip(*map(add_up, map(jnp.asarray, leaves)), strict=True)
    return Sum(jax.tree.unflatten(treedef, totals), counts[0], compute=metric.compute)


def _sum_whole(x: Array, dims: tuple[int, ...]) -> Array:
    """Sums whole numbers exactly: in int64 where JAX has it, else in two words of 32 bits.

    From two words it returns digits to the base 2^16 in uint32, in a last dim, the lowest first: so
    up to 2^16 replicas can be added. A number below zero has the digits of its two's complement.
    """
    if jax.dtypes.canonicalize_dtype(int).itemsize == 8:
        return x.astype(int).sum(dims)

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        low = a[0] + b[0]
        return low, a[1] + b[1] + (low < a[0]).astype(low.dtype)

    zero = jnp.uint32(0)
    words = x.astype(jnp.uint32), jnp.where(x < 0, ~zero, zero)
    low, high = jax.lax.reduce(words, (zero, zero), add, dims)
    return jnp.stack([low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16], axis=-1)


def _widened(x: Array) -> Array:
    """Casts to float32 at least, for sums; whole numbers become JAX's default float."""
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32) if is_inexact else float)


def _align(name: str, shape: tuple[int, ...], mask: Array) -> Array:
    # A mask on a device may hold any numbers: an entry counts once, or not at all.
    weights = (mask if mask.dtype == bool else mask > 0).astype(jnp.float32)
    if weights.ndim > len(shape):
        weights = weights.max(axis=tuple(range(len(shape), weights.ndim)))
    if weights.shape != shape[: weights.ndim]:
        raise ConfigError(
            f"{name!r} has shape {shape}, and batch['mask'] has shape {mask.shape}: the mask must "
            "equal the leading dims. Return one value per masked entry, or per row."
        )
    dims = tuple(range(weights.ndim, len(shape)))
    return jnp.broadcast_to(jnp.expand_dims(weights, dims), shape)


def weights_in(batch: Batch) -> tuple[str, ...]:
    """The entries of a batch that seem to be weights of losses, by name."""
    return tuple(x for x in WEIGHTS if x in batch) if isinstance(batch, Mapping) else ()


def count_valid_rows(mask: Array) -> Float[Array, ""]:
    """Number of rows with any valid entry."""
    rows = mask.reshape(mask.shape[0], -1).astype(jnp.float32)
    return (rows.max(axis=1) > 0).astype(jnp.float32).sum()


def sum_over_replicas(sums: Sums, *, axis: str) -> Sums:
    """Adds totals and counts over `axis`: one all-reduce for all scalars, and one per array."""
    return add_sums(sums, lambda x: jax.lax.psum(x, axis), ndim=0)


def add_sums(sums: Sums, add: Callable[[Array], Array], *, ndim: int) -> Sums:
    """Adds the leaves of `ndim` dims as one array of each dtype, and any other by itself."""
    leaves, treedef = jax.tree.flatten(sums)
    added = dict[int, Array]()
    with jax.named_scope("metrics"):
        for dtype in (jnp.float32, jnp.float64):
            numbers = [i for i, x in enumerate(leaves) if x.ndim == ndim and x.dtype == dtype]
            if numbers:
                total = add(jnp.stack([leaves[i] for i in numbers], axis=ndim))
                added |= zip(numbers, total, strict=True)
        all_added = [added[i] if i in added else add(x) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, all_added)


def divide(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """Divides a total by its count; a count of 0 gives zero."""
    return total / jnp.where(count == 0, 1.0, count)


def means(sums: Sums) -> dict[str, Float[Array, ""]]:
    """Means of loss and metrics, and "count": the valid entries of the loss."""
    return {n: divide(x.total, x.count) for n, x in sums.items()} | {"count": sums["loss"].count}


def mean_tree(totals: Tree, count: Float[Array, ""]) -> Tree:
    """Divides a tree of totals by one count, and keeps the dtypes; a count of 0 gives zero.

    It divides once and then multiplies each element, at a fraction of the cost of divisions. The
    result is the same if the count is a power of two, and differs by rounding for any other.
    """

    @functools.cache
    def inverse(dtype: np.dtype) -> Array:
        divisor = count.astype(jnp.promote_types(count.dtype, dtype))
        return divide(jnp.ones_like(divisor), divisor).astype(dtype)

    def scale(leaf: Array) -> Array:
        exact = _widened(leaf)
        return (exact * inverse(exact.real.dtype)).astype(leaf.dtype)

    return jax.tree.map(scale, totals)


class Totals:
    """Sums of many batches, added up on the host in float64, or in int64 for whole numbers."""

    def __init__(self) -> None:
        self._sums: dict[str, Sum] = {}

    def add(self, sums: Sums) -> None:
        """Adds one batch; waits for the device.

        Raises:
          ConfigError: If it has other metrics than earlier batches.
        """
        if self._sums and (differ := sorted(self._sums.keys() ^ sums.keys())):
            raise ConfigError(
                f"Metric {differ[0]!r} is returned for some batches and not for others. Return the "
                "same metrics for each."
            )
        for name, x in jax.tree.map(_widen, jax.device_get(sums)).items():
            if before := self._sums.get(name):
                total = jax.tree.map(np.add, before.total, x.total)
                x = dataclasses.replace(x, total=total, count=before.count + x.count)
            self._sums[name] = x

    def values(self) -> dict[str, Any]:
        """Means over all entries, and computed metrics; NaN where no entry was valid.

        "examples" is a number of rows. A computed value is a float, or a list for an array.
        """
        values = {name: _value(name, x) for name, x in self._sums.items()}
        if "examples" in self._sums:
            values["examples"] = int(self._sums["examples"].total)
        return values


def _widen(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint32:  # The digits of `_sum_whole`.
        places = np.arange(0, 64, 16, dtype=np.uint64)
        return (x.astype(np.uint64) << places).sum(-1, dtype=np.uint64).astype(np.int64)
    return np.asarray(x, np.float64 if x.dtype.kind == "f" else np.int64)


def _value(name: str, x: Sum) -> Any:
    if not x.count:
        return float("nan")
    if x.compute is None:
        return float(x.total / x.count)
    computed = np.asarray(x.compute(x.total, float(x.count)))
    if computed.dtype.kind not in "biuf":
        raise ConfigError(
            f"Metric {name!r}: compute returned {repr(computed)[:60]}. Return a number or an "
            "array of numbers; a jddp.Metric of its own for each value of a dict."
        )
    return computed.tolist()
