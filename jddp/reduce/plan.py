"""Decide on the host which gradients are sent together.

A bucket is a set of leaves of one dtype whose bytes are sent in one all-reduce. A few large
all-reduces cost less than hundreds of small ones, and a first bucket that is small leaves early,
while the rest of the backward pass is still computing.

    plan = plan_buckets(grads, bucket_bytes=(2**20, 25 * 2**20))
    print(plan)

This room knows shapes, dtypes and paths. It touches no array and no device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jddp.ground.errors import ConfigError
from jddp.ground.typing import Path, PyTree, Shaped, Shown, in_mebibytes


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are averaged by one collective.

    Attributes:
      paths: Names of the leaves, in the order in which they are packed.
      leaves: Positions of the leaves in the gradient tree.
      shapes: Shapes of the leaves.
      dtype: Common dtype of the leaves.
      wire_dtype: Dtype of the leaves on the wire.
    """

    paths: tuple[str, ...]
    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype
    wire_dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of elements in all leaves."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def bytes(self) -> int:
        """Bytes on the wire, once around."""
        return self.size * self.wire_dtype.itemsize


@dataclass(frozen=True)
class GatheredUnit:
    """Divided parameters that are gathered by one collective, for each micro-batch.

    Attributes:
      bucket: The parameters, in the order in which they are packed.
      num_slices: Iterations of the loops over layers in which they are gathered, a slice at a time;
        1 outside of loops.
      num_passes: Passes that gather them: 2 where the backward pass gathers them again.
    """

    bucket: Bucket
    num_slices: int
    num_passes: int

    @property
    def bytes(self) -> int:
        """Bytes of all slices of the parameters, once around."""
        return self.num_slices * self.bucket.bytes


@dataclass(frozen=True)
class BucketPlan(Shown):
    """The gradients that are sent, each exactly once, in buckets from first to last.

    Attributes:
      buckets: Buckets in the order in which they are sent.
      unused: Names of the leaves that no gradient reaches: they are zero on every replica, and
        nothing is sent for them.
      notes: Further facts, a sentence each.
      units: Divided parameters, in the units in which they are gathered.
      group_size: Number of replicas that divide parameters among them; None where all are whole.
    """

    buckets: tuple[Bucket, ...]
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    units: tuple[GatheredUnit, ...] = ()
    group_size: int | None = None

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self.buckets)

    @property
    def in_words(self) -> str:
        """Number of buckets and units, such as "1 bucket and 4 units"."""
        kinds = (self.buckets, "bucket"), (self.units, "unit")
        words = (f"{len(x)} {noun}{'' if len(x) == 1 else 's'}" for x, noun in kinds if x)
        return " and ".join(words) or "0 buckets"

    @property
    def wire_bytes(self) -> int:
        """Bytes that each replica contributes to an optimizer step, in all buckets."""
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def headline(self) -> str:
        """Number of buckets and units, and their size, in a line."""
        if self.group_size and not (self.units or self.buckets):
            return "units of divided parameters, known once there is a batch"
        size = in_mebibytes(self.wire_bytes + sum(x.bytes for x in self.units))
        ending = "of parameters" if self.units else "on the wire per step"
        return f"{self.in_words}, {size} MiB {ending}"

    def noted(self, *notes: str) -> "BucketPlan":
        """The plan with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def __str__(self) -> str:
        """A table of one line per kind of bucket, for a terminal of 80 columns."""
        buckets = _table_rows("bucket", "first and last leaf", [(x, "") for x in self.buckets])
        found = [(x.bucket, f"{x.num_passes} x {x.num_slices:<4} ") for x in self.units]
        units = _table_rows("unit", "passes x slices", found)
        return "\n".join((self.headline, *buckets, *units, *self._remarks()))

    def _remarks(self) -> tuple[str, ...]:
        if not self.unused:
            return self.notes
        named = ", ".join(self.unused[:3]) + (", ..." if len(self.unused) > 3 else "")
        return (*self.notes, f"{len(self.unused)} unused, not sent: {_shorten(named, 55)}")


def _cells(bucket: Bucket) -> tuple[str, ...]:
    """Size in MiB, number of leaves, dtype, and names of the first and the last leaf."""
    ends = " .. ".join(dict.fromkeys((bucket.paths[0], bucket.paths[-1])))
    size = in_mebibytes(bucket.bytes)
    return size, f"{len(bucket.paths)}", bucket.wire_dtype.name, ends


def _table_rows(noun: str, last: str, found: Sequence[tuple[Bucket, str]]) -> Iterator[str]:
    """The lines of a table; buckets of equal size, number of leaves and dtype share a line.

    Args:
      noun: Head of the numbers.
      last: Head of the last column.
      found: Each bucket, with words before its names.
    """
    kinds = dict[tuple[str, ...], list[int]]()
    for number, (bucket, times) in enumerate(found):
        kinds.setdefault((*_cells(bucket)[:3], times), []).append(number)
    wide = max([6, *(len(_in_short(x)) for x in kinds.values())])
    if found:
        yield f"{noun:>{wide}} {'MiB':>9} {'leaves':>6}  {'dtype':<9} {last}"
    for (size, num_leaves, dtype, times), own in kinds.items():
        names = _shorten(_cells(found[own[0]][0])[3], 51 - wide - len(times))
        yield f"{_in_short(own):>{wide}} {size:>9} {num_leaves:>6}  {dtype:<9} {times}{names}"


def _in_short(numbers: Sequence[int]) -> str:
    """All numbers, or the first two and the last."""
    text = ",".join(map(str, numbers))
    return text if len(text) <= 12 else f"{numbers[0]},{numbers[1]}..{numbers[-1]}"


def plan_buckets(
    tree: PyTree,
    *,
    bucket_bytes: int | Sequence[int],
    ready: Sequence[int | None] | None = None,
    wire_dtype: np.dtype | None = None,
    is_left_out: Callable[[tuple[int, ...]], bool] | None = None,
) -> BucketPlan:
    """Groups the leaves of `tree` into buckets of one dtype each.

    Leaves are taken in the order in which the backward pass finishes them, or from last to first if
    that is not known. Each dtype fills its own buckets. A bucket is closed when the next leaf would
    take it over its limit. A leaf larger than the limit gets a bucket of its own: leaves are never
    split. Buckets are ordered by their last leaf, so that each can leave as soon as it is complete.
    Leaves without elements are left out.

    Args:
      tree: Gradients, or their shapes and dtypes from `jax.eval_shape`.
      bucket_bytes: Largest size of a bucket on the wire, in bytes; or the sizes of the first, the
        second, ... of each dtype: the last one repeats.
      ready: Position in the backward pass at which each leaf is finished; None for a leaf that no
        gradient reaches.
      wire_dtype: Dtype to which wider floats are cast on the wire.
      is_left_out: Function of a shape: whether such leaves are in no bucket; None for none.

    Returns:
      A plan with every leaf of `tree` exactly once, except leaves that are left out, have no
      elements or get no gradient.

    Raises:
      ConfigError: If a leaf is not a floating or complex array.

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
      VLDB 2020, section 3.2.3. https://arxiv.org/abs/2006.15704. There a bucket closes once it
      has reached its limit; here a bucket never passes its limit.
    """
    limits = (bucket_bytes,) if isinstance(bucket_bytes, int) else tuple(bucket_bytes)
    leaves = [
        _leaf(i, path, leaf, wire_dtype)
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree))
    ]
    # Without a measured order, the last layers count as finished first, as in PyTorch DDP before
    # its first backward pass.
    when = [-i for i in range(len(leaves))] if ready is None else ready
    # The traced program shows them before any step, and the same in every process: no replica waits
    # for a gradient that never comes. DDP finds them at run time.
    unused = tuple(leaf.paths[0] for leaf, ready in zip(leaves, when, strict=True) if ready is None)
    sent = [x for x in leaves if x.bytes and when[x.leaves[0]] is not None]
    if is_left_out is not None:
        sent = [x for x in sent if not is_left_out(x.shapes[0])]

    def rank(bucket: Bucket) -> tuple[int | None, int]:
        # If leaves are finished at once, the last of the tree comes first.
        return when[bucket.leaves[-1]], -bucket.leaves[-1]

    # Buckets of several dtypes fill side by side, and may be completed in another order than they
    # were opened. All replicas reduce in this one order, or collectives would hang.
    buckets = sorted(map(_joined, _fill(sorted(sent, key=rank), limits)), key=rank)
    return BucketPlan(tuple(buckets), unused)


def _fill(leaves: Sequence[Bucket], limits: Sequence[int]) -> list[list[Bucket]]:
    """Fills buckets of one dtype each, up to the limits; the last limit repeats."""
    groups: list[list[Bucket]] = []
    filling: dict[np.dtype, list[Bucket]] = {}
    num_opened: dict[np.dtype, int] = {}
    room: dict[np.dtype, int] = {}
    for leaf in leaves:
        # A bucket is closed before its limit, not after it: it waits for its last leaf, so a large
        # leaf would delay all finished leaves of a nearly full bucket.
        if leaf.dtype not in filling or leaf.bytes > room[leaf.dtype]:
            num = num_opened.get(leaf.dtype, 0)
            num_opened[leaf.dtype] = num + 1
            room[leaf.dtype] = limits[min(num, len(limits) - 1)]
            filling[leaf.dtype] = []
            groups.append(filling[leaf.dtype])
        filling[leaf.dtype].append(leaf)
        room[leaf.dtype] -= leaf.bytes
    return groups


def _joined(group: Sequence[Bucket]) -> Bucket:
    """One bucket of the leaves of several."""
    fields = [(x.paths, x.leaves, x.shapes) for x in group]
    paths, leaves, shapes = (sum(parts, ()) for parts in zip(*fields, strict=True))
    return Bucket(paths, leaves, shapes, group[0].dtype, group[0].wire_dtype)


def _leaf(position: int, path: Path, leaf: PyTree, wire_dtype: np.dtype | None) -> Bucket:
    """A bucket of one leaf."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not isinstance(leaf, Shaped) or not jax.numpy.issubdtype(leaf.dtype, np.inexact):
        what = f"an array of {leaf.dtype}" if isinstance(leaf, Shaped) else type(leaf).__name__
        raise ConfigError(
            f"Gradient leaf {name!r} is {what}; only floating and complex arrays can be averaged. "
            "Keep it out of the parameters."
        )
    dtype = np.dtype(leaf.dtype)
    is_narrower = wire_dtype is not None and wire_dtype.itemsize < dtype.itemsize
    # A complex or equally narrow leaf is sent as it is.
    if wire_dtype is None or not (is_narrower and jax.numpy.issubdtype(dtype, np.floating)):
        wire_dtype = dtype
    return Bucket((name,), (position,), (tuple(leaf.shape),), dtype, wire_dtype)


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
