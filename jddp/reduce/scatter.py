"""Buckets cut into a part for each replica: what is reduced by a reduce-scatter, or in one order.

A bucket is packed as (replicas, part): each leaf is cut into a part for each replica, and what goes
to one of them stands in one row (`parts`). So each replica gets a part of every leaf, and

    Scattered   ends with that: an optimizer that works element by element needs no more
    Ordered     adds it up in one order, whatever the number of replicas, and all get all parts
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jddp.pairs import add_in_pairs
from jddp.reduce.hooks import GradBucket
from jddp.reduce.parts import own_part, pack, part_shape, unpack
from jddp.reduce.reduction import Reduction

PyTree = Any


class Scattered(Reduction):
    """A `Reduction` that gives each replica its part of every mean, as `own_part` cuts it."""

    keeps_parts = True

    def _in_one(self, leaves: list[Any]) -> Any:
        return pack(leaves, lax.axis_size(self.axis))

    def _reduce(self, bucket: GradBucket, comm_state: PyTree) -> tuple[GradBucket, PyTree]:
        with jax.named_scope(f"bucket_{bucket.index}"):
            return self.hook.reduce(bucket, comm_state, self.axis)

    def _unpack_into(self, leaves: list[Any], bucket: GradBucket) -> None:
        planned, num_parts = bucket.planned, lax.axis_size(self.axis)
        for members, value in zip(bucket.members, bucket.values, strict=True):
            shapes = [part_shape(planned.shapes[i], num_parts) for i in members]
            ends = [*itertools.accumulate(map(math.prod, shapes))]
            pieces = jnp.split(value, ends[:-1])
            for i, shape, piece in zip(members, shapes, pieces, strict=True):
                leaves[planned.leaves[i]] = piece.reshape(shape)

    def _without(self, leaf: Any) -> Any:
        return own_part(leaf, self.axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordered(Reduction):
    """A `Reduction` of gradients that are rows of sums, as `jddp.pairs` makes them.

    Each replica gets its part of all rows, goes on adding where they left off, and all get all
    parts: the bytes of an all-reduce in a ring where each replica has one row.

    Attributes:
      num_shards: How many gradients the sums are of: what averages are over.
    """

    num_shards: int

    def _in_one(self, leaves: list[Any]) -> Any:
        num_parts = lax.axis_size(self.axis)
        return jax.vmap(lambda *rows: pack(rows, num_parts))(*leaves)

    def _reduce(self, bucket: GradBucket, comm_state: PyTree) -> tuple[GradBucket, PyTree]:
        with jax.named_scope(f"bucket_{bucket.index}"):
            return jax.tree.map(self._mean, bucket), comm_state

    def _mean(self, x: jax.Array) -> jax.Array:
        """From the sums of this replica, cut, (rows, replicas, part), to all parts of the mean."""
        rows = lax.all_to_all(x, self.axis, split_axis=1, concat_axis=0, tiled=True)
        return lax.all_gather(add_in_pairs(rows[:, 0]) / self.num_shards, self.axis)

    def _unpack_into(self, leaves: list[Any], bucket: GradBucket) -> None:
        planned = bucket.planned
        for members, rows in zip(bucket.members, bucket.values, strict=True):
            arrays = unpack(rows, [planned.shapes[i] for i in members])
            for i, array in zip(members, arrays, strict=True):
                leaves[planned.leaves[i]] = array

    def _without(self, leaf: Any) -> Any:
        return leaf[0]


def scatter_mean(tree: PyTree, axis: str) -> PyTree:
    """This replica's row, of the mean over replicas of each array of (replicas, part)."""
    return jax.tree.map(
        lambda x: lax.psum_scatter(x, axis, scatter_dimension=0) / lax.axis_size(axis), tree
    )


def exchange_mean(tree: PyTree, axis: str) -> PyTree:
    """The same, by sending rows to whom they belong, and adding them there, as float32 at least.

    As many bytes travel. Between processes XLA:CPU's reduce-scatter gives up where one waits 30
    seconds for another (https://github.com/jax-ml/jax/issues/40831); this waits.
    """

    def mean(x: jax.Array) -> jax.Array:
        rows = lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
        total = add_in_pairs(rows.astype(jnp.promote_types(x.dtype, jnp.float32)))
        return (total / len(x)).astype(x.dtype)

    return jax.tree.map(mean, tree)
