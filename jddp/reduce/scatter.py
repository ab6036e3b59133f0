"""Buckets of which each replica gets its part of the mean: a reduce-scatter in place of all-reduce.

A bucket is packed as (replicas, part): each leaf is cut into a part for each replica, and what goes
to one of them stands in one row. So each replica ends with a part of every leaf, and an optimizer
that works element by element needs no more (`jddp.update`).
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jddp.reduce.hooks import GradBucket
from jddp.reduce.parts import cut, own_part, part_shape
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reduction import Reduction

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Scattered(Reduction):
    """A `Reduction` that gives each replica its part of every gradient, as `own_part` cuts it."""

    keeps_parts = True

    def at_end(
        self, grads: PyTree, comm_state: PyTree, *, plan: BucketPlan, scale: float = 1.0
    ) -> tuple[PyTree, PyTree]:
        """As `Reduction.at_end`; returns this replica's parts."""
        parts, comm_state = super().at_end(grads, comm_state, plan=plan, scale=scale)
        return self._cut_unsent(parts, plan), comm_state

    def when_ready(self, *args: Any, plan: BucketPlan, **options: Any) -> tuple[PyTree, PyTree]:
        """As `Reduction.when_ready`; returns this replica's parts."""
        parts, comm_state = super().when_ready(*args, plan=plan, **options)
        return self._cut_unsent(parts, plan), comm_state

    def _cut_unsent(self, tree: PyTree, plan: BucketPlan) -> PyTree:
        """What is in no bucket is alike on all replicas, which need not send it to have a part."""
        leaves, treedef = jax.tree.flatten(tree)
        sent = {i for bucket in plan.buckets for i in bucket.leaves}
        parts = [x if i in sent else own_part(x, self.axis) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(treedef, parts)

    def _pack(self, leaves: list[Any], plan: BucketPlan, index: int, scale: float) -> GradBucket:
        planned, num_parts = plan.buckets[index], lax.axis_size(self.axis)
        values = [
            jnp.concatenate([cut(leaves[i], num_parts) for i in members], axis=1)
            for members in self._arrays(planned)
        ]
        return GradBucket(values, planned, index, index == len(plan) - 1, scale)

    def _reduce(self, bucket: GradBucket, comm_state: PyTree) -> tuple[GradBucket, PyTree]:
        with jax.named_scope(f"bucket_{bucket.index}"):
            return self.hook.reduce(bucket, comm_state, self.axis)

    def _unpack_into(self, leaves: list[Any], bucket: GradBucket) -> None:
        planned, num_parts = bucket.planned, lax.axis_size(self.axis)
        for members, value in zip(self._arrays(planned), bucket.values, strict=True):
            shapes = [part_shape(planned.shapes[i], num_parts) for i in members]
            ends = [*itertools.accumulate(map(math.prod, shapes))]
            pieces = jnp.split(value, ends[:-1])
            for i, shape, piece in zip(members, shapes, pieces, strict=True):
                leaves[planned.leaves[i]] = piece.reshape(shape)


def scatter_mean(tree: PyTree, axis: str) -> PyTree:
    """This replica's row, of the mean over replicas of each array of (replicas, part)."""
    return jax.tree.map(
        lambda x: lax.psum_scatter(x, axis, scatter_dimension=0) / lax.axis_size(axis), tree
    )


def exchange_mean(tree: PyTree, axis: str) -> PyTree:
    """The same, by sending rows to whom they belong, and adding them there.

    As many bytes travel. Rows are added in pairs, always the same, half-precision ones in float32.
    Between processes XLA:CPU's reduce-scatter gives up where one waits 30 seconds for another
    (https://github.com/jax-ml/jax/issues/40831); this waits.
    """

    def mean(x: jax.Array) -> jax.Array:
        rows = lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
        total = add_in_pairs(rows.astype(jnp.promote_types(x.dtype, jnp.float32)))
        return (total / len(x)).astype(x.dtype)

    return jax.tree.map(mean, tree)


def add_in_pairs(rows: jax.Array) -> jax.Array:
    """Adds neighbours, and then the sums of neighbours, until one is left."""
    while len(rows) > 1:
        paired = len(rows) // 2 * 2
        rows = jnp.concatenate([rows[:paired:2] + rows[1:paired:2], rows[paired:]])
    return rows[0]
