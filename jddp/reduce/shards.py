"""Arrays cut into shards, one for each replica, and rows exchanged between replicas.

An array is flattened, filled up with zeros and cut into rows of equal length, one for each replica.
A shard keeps the number of dims of its array, so that an optax mask by number of dims still works.

    kernel (3, 3, 10) on 4 replicas  ─►  4 rows of 23, the last with 2 zeros  ─►  shards (23, 1, 1)

Or an array is divided along one of its dims, and keeps the other dims:

    kernel (768, 3072) on 8 replicas  ─►  parts (768, 384), along dim 1

Several groups of replicas may divide an array, each among its own replicas.

    exchange = exchange_on("tpu")
    part = exchange.mean(rows, axis)      # (replicas, part): this replica's row of the mean
    rows = exchange.gather(part, axis)    # (part,): the parts of all replicas, (replicas, part)

    GPUs   a reduce-scatter and an all-gather of vectors
    CPUs   an all-to-all, whose rows are added where they arrive
    TPUs   the collectives of GPUs, of whole tiles: XLA:TPU makes an all-reduce of a vector that
           ends inside a tile, which sends twice as much

Where a slice of TPUs is no ring (4 x 4 chips and more, and each v4), XLA:TPU makes an all-reduce of
a reduce-scatter in any case; gathers stay gathers (libtpu 0.0.42, `benchmarks/tpus.py`).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jddp.ground.numbers import add_in_pairs
from jddp.ground.typing import Tree

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of neighbouring replicas; each group has whole arrays, a part on each replica.

    Attributes:
      size: Number of replicas of a group.
      num: Number of groups.
    """

    size: int
    num: int = 1

    @property
    def members(self) -> list[list[int]] | None:
        """The replicas of each group; None for one group, of all replicas."""
        return None if self.num == 1 else self._rows.tolist()

    @property
    def peers(self) -> list[list[int]]:
        """The replicas that have the same parts, one of each group."""
        return self._rows.T.tolist()

    @property
    def _rows(self) -> np.ndarray:
        return np.arange(self.num * self.size).reshape(self.num, self.size)


def cut(x: jax.Array, num_shards: int) -> jax.Array:
    """Cuts an array into rows, (num_shards, shard)."""
    size = math.prod(shard_shape(x.shape, num_shards))
    # Collectives need rows of equal length on all replicas. Each array is cut by itself, so that
    # every replica has a share of each array, and all updates take equally long.
    return jnp.pad(x.ravel(), (0, num_shards * size - x.size)).reshape(num_shards, size)


def pack(arrays: Sequence[jax.Array], num_shards: int) -> jax.Array:
    """Cuts arrays of one dtype and puts them side by side: (num_shards, all their shards)."""
    return jnp.concatenate([cut(x, num_shards) for x in arrays], axis=1)


def unpack(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Puts arrays together from their rows; the inverse of `pack`."""
    sizes = [shard_shape(shape, len(rows))[0] for shape in shapes]
    pieces = jnp.split(rows, [*itertools.accumulate(sizes)][:-1], axis=1)
    return [
        piece.ravel()[: math.prod(shape)].reshape(shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def own_shard(x: jax.Array, axis: str) -> jax.Array:
    """This replica's shard of an array that all replicas have."""
    num_shards = jax.lax.axis_size(axis)
    row = jax.lax.dynamic_index_in_dim(cut(x, num_shards), jax.lax.axis_index(axis), keepdims=False)
    return row.reshape(shard_shape(x.shape, num_shards))


def shard_shape(shape: Shape, num_shards: int) -> Shape:
    """The shape of a shard: its elements first, then ones; at least one dim."""
    return (-(-math.prod(shape) // num_shards), *[1] * (len(shape) - 1))


def divided_dim(shape: Shape, num: int) -> int | None:
    """The dim along which an array is divided over `num` replicas; None if it stays whole.

    It depends on the shape alone, so a moving average and an optimizer's state are divided equally.
    """
    fitting = [dim for dim, size in enumerate(shape) if size and size % num == 0]
    return max(fitting, key=lambda dim: shape[dim], default=None) if math.prod(shape) else None


def whole(x: jax.Array, dim: int | None, axis: str, groups: Groups) -> jax.Array:
    """An array from the parts of a group of replicas."""
    if dim is None:
        return x
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups.members)


@dataclasses.dataclass(frozen=True)
class Flat:
    """Flattens arrays and cuts them, as `own_shard` does.

    Attributes:
      axis: Name of the axis of the replicas.
      num: Number of replicas.
    """

    axis: str
    num: int

    def part_shape(self, shape: Shape) -> Shape:
        """Returns the shape of a shard."""
        return shard_shape(shape, self.num)

    def own(self, x: jax.Array) -> jax.Array:
        """Returns this replica's shard."""
        return own_shard(x, self.axis)

    def whole(self, part: jax.Array, shape: Shape) -> jax.Array:
        """Gathers the shards of all replicas."""
        (array,) = unpack(jax.lax.all_gather(part.ravel(), self.axis), [shape])
        return array


@dataclasses.dataclass(frozen=True)
class AlongDim:
    """Divides arrays along their `divided_dim`; an array without one is whole on each replica.

    Attributes:
      axis: Name of the axis of the replicas.
      groups: Groups of replicas; each group has all parts.
    """

    axis: str
    groups: Groups

    @property
    def num(self) -> int:
        """Number of parts of an array."""
        return self.groups.size

    @property
    def _place(self) -> jax.Array:
        """The place of this replica in its group."""
        return jax.lax.axis_index(self.axis) % self.num

    def part_shape(self, shape: Shape) -> Shape:
        """Returns the shape of a part."""
        dim = divided_dim(shape, self.num)
        if dim is None:
            return shape or (1,)
        return (*shape[:dim], shape[dim] // self.num, *shape[dim + 1 :])

    def own(self, x: jax.Array) -> jax.Array:
        """Returns this replica's part."""
        dim = divided_dim(x.shape, self.num)
        if dim is None:
            return x
        size = x.shape[dim] // self.num
        return jax.lax.dynamic_slice_in_dim(x, self._place * size, size, dim)

    def whole(self, part: jax.Array, shape: Shape) -> jax.Array:
        """Gathers the parts of all replicas."""
        return whole(part, divided_dim(shape, self.num), self.axis, self.groups)


Division = Flat | AlongDim


# A tile of XLA:TPU has 8 x 128 numbers of 32 bits. https://openxla.org/xla/tiled_layout
TILE_BYTES, LANES = 8 * 128 * 4, 128


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges rows as vectors, which suits GPUs.

    Attributes:
      groups: Groups of replicas, each of which exchanges its own rows; None for one of all.
    """

    groups: Groups | None = None

    @property
    def members(self) -> list[list[int]] | None:
        """The replicas of each group, or None."""
        return None if self.groups is None else self.groups.members

    def mean(self, tree: Tree, axis: str) -> Tree:
        """Returns this replica's row of the mean, for each array of (replicas, part)."""
        return jax.tree.map(lambda rows: self._mean(rows, axis), tree)

    def gather(self, part: jax.Array, axis: str) -> jax.Array:
        """Returns the parts of all replicas, (replicas, part)."""
        return jax.lax.all_gather(part, axis, axis_index_groups=self.members)

    def _mean(self, rows: jax.Array, axis: str) -> jax.Array:
        return jax.lax.psum_scatter(rows, axis, axis_index_groups=self.members) / len(rows)


VECTORS = Exchange()


class AllToAll(Exchange):
    """Sends each row to its replica, which adds them in float32 at least.

    As many bytes are sent. Between processes XLA:CPU's reduce-scatter fails where one waits 30
    seconds for another (https://github.com/jax-ml/jax/issues/40831); an all-to-all waits.
    """

    def _mean(self, rows: jax.Array, axis: str) -> jax.Array:
        own = jax.lax.all_to_all(
            rows, axis, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=self.members
        )
        # In half precision a small gradient would vanish next to a large partial sum. The wire
        # carries the wire dtype in any case.
        total = add_in_pairs(own.astype(jnp.promote_types(rows.dtype, jnp.float32)))
        return (total / len(rows)).astype(rows.dtype)


class InTiles(Exchange):
    """Pads parts to whole tiles of a TPU's memory."""

    def gather(self, part: jax.Array, axis: str) -> jax.Array:
        """Returns the parts of all replicas, (replicas, part)."""
        rows = super().gather(_in_tiles(part[None])[0], axis)
        return rows.reshape(len(rows), -1)[:, : part.size]

    def _mean(self, rows: jax.Array, axis: str) -> jax.Array:
        return super()._mean(_in_tiles(rows), axis).ravel()[: rows.shape[1]]


def exchange_on(platform: str, groups: Groups | None = None) -> Exchange:
    """Returns the exchange for the hardware: "cpu", "tpu" or another word for GPUs."""
    return {"cpu": AllToAll, "tpu": InTiles}.get(platform, Exchange)(groups)


def _in_tiles(rows: jax.Array) -> jax.Array:
    """Rows (n, part) as (n, tiles, 128), the end of each filled with zeros."""
    size = TILE_BYTES // rows.dtype.itemsize
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % size))).reshape(len(rows), -1, LANES)
