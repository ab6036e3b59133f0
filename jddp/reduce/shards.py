"""Arrays cut into shards, one for each replica.

An array is flattened, filled up with zeros and cut into rows of equal length, one for each replica.
A shard keeps the number of dims of its array, so that an optax mask by that number still works.

    kernel (3, 3, 10) on 4 replicas  ─►  4 rows of 23, the last with 2 zeros  ─►  shards (23, 1, 1)

Or it is divided along one of its dims, and keeps its shape but for that dim:

    kernel (768, 3072) on 8 replicas  ─►  parts (768, 384), along dim 1

Several groups of replicas may divide it, each among its own replicas.

A computation that needs whole arrays has owners: arrays of one shape are stacked, an all-to-all
sends each replica the parts of those that it owns, and another one sends the results back.

    12 parts (768, 384) on each of 8 replicas  ─►  2 whole arrays (768, 3072) on each of 6
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    # every replica has a share of each, and its update takes as long as that of the others.
    return jnp.pad(x.ravel(), (0, num_shards * size - x.size)).reshape(num_shards, size)


def pack(arrays: Sequence[jax.Array], num_shards: int) -> jax.Array:
    """Cuts arrays of one dtype, side by side: (num_shards, all their shards)."""
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
    num_shards = lax.axis_size(axis)
    row = lax.dynamic_index_in_dim(cut(x, num_shards), lax.axis_index(axis), keepdims=False)
    return row.reshape(shard_shape(x.shape, num_shards))


def shard_shape(shape: Shape, num_shards: int) -> Shape:
    """The shape of a shard: its elements first, then ones; at least one dim."""
    return (-(-math.prod(shape) // num_shards), *[1] * (len(shape) - 1))


def divided_dim(shape: Shape, num: int) -> int | None:
    """The dim along which an array is divided over so many replicas; None for one that stays whole.

    By its shape alone, so that a moving average and an optimizer's state are divided alike.
    """
    fitting = [dim for dim, size in enumerate(shape) if size and size % num == 0]
    return max(fitting, key=lambda dim: shape[dim], default=None) if math.prod(shape) else None


def whole(x: jax.Array, dim: int | None, axis: str, groups: Groups) -> jax.Array:
    """An array from the parts of a group of replicas."""
    if dim is None:
        return x
    return lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups.members)


@runtime_checkable
class Division(Protocol):
    """How arrays are divided over the replicas, and how owners get whole ones for a moment.

    `to_owners` and `from_owners` work on a stack of arrays: several of one shape, or the slices of
    one along its first dim, which then are of size 1 along it.
    """

    def __hash__(self) -> int:
        """Equal divisions are one."""

    def part_shape(self, shape: Shape) -> Shape:
        """Returns the shape of a replica's part of an array; of one dim at least."""

    def own(self, x: jax.Array) -> jax.Array:
        """Returns this replica's part of an array that it has as a whole."""

    def whole(self, part: jax.Array, shape: Shape) -> jax.Array:
        """Returns an array of `shape` from the parts of all replicas, which send them."""

    def to_owners(self, parts: Sequence[jax.Array], shape: Shape, *, sliced: bool) -> jax.Array:
        """Returns the whole arrays that this replica owns, stacked; the last may be of zeros.

        Args:
          parts: This replica's parts of arrays of `shape`; of one, if it is sliced.
          shape: Shape of each of them as a whole.
          sliced: Whether the stack is of the slices of one array.
        """

    def from_owners(
        self, stack: jax.Array, num: int, shape: Shape, *, sliced: bool
    ) -> list[jax.Array]:
        """Returns this replica's parts of `num` arrays; the inverse of `to_owners`."""


@final
@dataclasses.dataclass(frozen=True)
class Flat:
    """Arrays are flattened and cut, as `own_shard` does.

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
        (array,) = unpack(lax.all_gather(part.ravel(), self.axis), [shape])
        return array

    def to_owners(self, parts: Sequence[jax.Array], shape: Shape, *, sliced: bool) -> jax.Array:
        """Sends shards to the owners of whole arrays."""
        if sliced:
            size = -(-shape[0] // self.num) * math.prod(shape[1:])
            block = to_larger_blocks(parts[0].ravel(), size, self.axis)
            return block.reshape(-1, 1, *shape[1:])
        rows = _padded(jnp.stack([x.ravel() for x in parts]), self.num)
        rows = lax.all_to_all(rows, self.axis, 0, 1, tiled=True)
        return rows[:, : math.prod(shape)].reshape(-1, *shape)

    def from_owners(
        self, stack: jax.Array, num: int, shape: Shape, *, sliced: bool
    ) -> list[jax.Array]:
        """Sends each replica its shards."""
        part = shard_shape(shape, self.num)
        if sliced:
            return [to_smaller_blocks(stack.ravel(), part[0], self.axis).reshape(part)]
        rows = stack.reshape(len(stack), -1)
        rows = jnp.pad(rows, ((0, 0), (0, self.num * part[0] - rows.shape[1])))
        rows = lax.all_to_all(rows, self.axis, 1, 0, tiled=True)
        return [row.reshape(part) for row in rows[:num]]


@final
@dataclasses.dataclass(frozen=True)
class AlongDim:
    """Arrays are divided along a dim, `divided_dim`; one that has none is whole on each replica.

    Attributes:
      axis: Name of the axis of the replicas.
      groups: Groups of replicas, each of which has all parts, and owners of its own.
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
        return lax.axis_index(self.axis) % self.num

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
        return lax.dynamic_slice_in_dim(x, self._place * size, size, dim)

    def whole(self, part: jax.Array, shape: Shape) -> jax.Array:
        """Gathers the parts of all replicas."""
        return whole(part, divided_dim(shape, self.num), self.axis, self.groups)

    def to_owners(self, parts: Sequence[jax.Array], shape: Shape, *, sliced: bool) -> jax.Array:
        """Sends parts to the owners of whole arrays."""
        dim = divided_dim(shape, self.num)
        rows = parts[0][:, None] if sliced else jnp.stack(parts)
        if sliced and dim == 0:  # whole slices already
            return rows
        rows = _padded(rows, self.num)
        if dim is None:
            own = len(rows) // self.num
            return lax.dynamic_slice_in_dim(rows, self._place * own, own)
        return self._exchanged(rows, 0, dim + 1)

    def from_owners(
        self, stack: jax.Array, num: int, shape: Shape, *, sliced: bool
    ) -> list[jax.Array]:
        """Sends each replica its parts."""
        dim = divided_dim(shape, self.num)
        if sliced and dim == 0:
            return [stack[:, 0]]
        if dim is None:
            rows = whole(stack, 0, self.axis, self.groups)
        else:
            rows = self._exchanged(stack, dim + 1, 0)
        return [rows[: shape[0], 0]] if sliced else [*rows[:num]]

    def _exchanged(self, x: jax.Array, split: int, joined: int) -> jax.Array:
        members = self.groups.members
        return lax.all_to_all(x, self.axis, split, joined, axis_index_groups=members, tiled=True)


def to_larger_blocks(shard: jax.Array, size: int, axis: str) -> jax.Array:
    """This replica's block of a vector, from the shards of all replicas; the last end in zeros."""
    if size == shard.size:
        return shard
    starts, rounds = _exchange(shard.size, size, lax.axis_size(axis))
    pieces = [lax.ppermute(shard, axis, pairs) for pairs in rounds]
    start = jnp.asarray(starts)[lax.axis_index(axis)]
    return lax.dynamic_slice_in_dim(jnp.concatenate(pieces), start, size)


def to_smaller_blocks(block: jax.Array, size: int, axis: str) -> jax.Array:
    """This replica's shard of a vector; the inverse of `to_larger_blocks`."""
    if size == block.size:
        return block
    starts, rounds = _exchange(size, block.size, lax.axis_size(axis))
    start = size - jnp.asarray(starts)[lax.axis_index(axis)]
    padded = jnp.pad(block, size)
    shard = jnp.zeros(size, block.dtype)
    # A shard is of two blocks at most, and the piece from each has zeros in place of the other's.
    for i, pairs in enumerate(rounds):
        piece = lax.dynamic_slice_in_dim(padded, start + i * size, size)
        shard += lax.ppermute(piece, axis, [(owner, source) for source, owner in pairs])
    return shard


def _exchange(shard: int, block: int, num: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Where blocks start in the first of their shards; and rounds of pairs (shard, block)."""
    firsts = [i * block // shard for i in range(num)]
    starts = [i * block - first * shard for i, first in enumerate(firsts)]
    num_rounds = -(-(max(starts) + block) // shard)

    def is_in(source: int, owner: int) -> bool:
        return source < num and source * shard < (owner + 1) * block

    # No two blocks start in one shard, since they are as large at least: each round is one
    # collective-permute.
    rounds = [
        [(first + i, owner) for owner, first in enumerate(firsts) if is_in(first + i, owner)]
        for i in range(num_rounds)
    ]
    return starts, rounds


def _padded(rows: jax.Array, num: int) -> jax.Array:
    """Rows and zeros, so that each of `num` replicas owns as many."""
    return jnp.pad(rows, ((0, -len(rows) % num), *[(0, 0)] * (rows.ndim - 1)))
