"""Parameters divided over the replicas, and gathered unit by unit.

A parameter keeps its shape, and is divided along one of its dims: the largest that the number of
replicas divides, or none. A unit is several parameters of one dtype that are gathered by one
all-gather. Its transpose, in the backward pass, is one reduce-scatter: each replica gets its part
of the mean of the gradients.

    kernel (768, 3072) on 8 replicas  ─►  (768, 384) on each        dim 1
    bias (10,) on 8 replicas          ─►  whole on each             None

Where groups of replicas divide parameters, each by itself, replicas get their parts of the mean of
their group. These are averaged between groups once for a step, in buckets.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddp.reduce.hooks import TakeMean, mean_over
from jddp.reduce.plan import plan_buckets
from jddp.reduce.shards import Groups, Shape
from jddp.typing import PyTree

Function = Callable[..., PyTree]
UNIT = "unit_of_"  # begins the scopes of what is sent for a unit
BETWEEN = f"{UNIT}gradients_between_groups"
FORGOTTEN = "made_of_parameters"  # the name of calls whose results are not kept for a backward pass


@dataclasses.dataclass(frozen=True)
class Gather:
    """Gathers the parameters of a unit, and averages their gradients.

    Attributes:
      axis: Name of the mapped axis.
      average: Mean of rows, (replicas of a group, part), of which a replica gets its own.
      groups: Groups of replicas that divide parameters.
      wire_dtype: Dtype to which wider gradients are cast on the wire, or None.
    """

    axis: str
    average: TakeMean
    groups: Groups
    wire_dtype: np.dtype | None = None

    def __call__(
        self, parts: Sequence[jax.Array], dims: Sequence[int], dtype: np.dtype
    ) -> list[jax.Array]:
        """Gathers arrays of one dtype.

        Args:
          parts: This replica's parts.
          dims: Dim along which each is divided.
          dtype: Dtype in which they are gathered; the results have their own.
        """
        shapes = [x.shape for x in parts]
        own = parts[0].dtype

        def gather(*parts: jax.Array) -> tuple[jax.Array, ...]:
            with jax.named_scope(f"{UNIT}parameters"):
                row, members = _joined(parts).astype(dtype), self.groups.members
                rows = lax.all_gather(row, self.axis, axis_index_groups=members)
                wholes = map(_merged, _cut(rows, shapes), dims)
                # The program casts them back at once, and XLA drops both casts. So gradients come
                # back in the parameters' own dtype, and are averaged in it.
                return tuple(x.astype(own) for x in wholes)

        def forward(*parts: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[()]]:
            return forgotten(gather)(*parts), ()

        def backward(_: tuple[()], grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(self._mean_parts(grads, dims, shapes))

        return [*forgotten(gather, forward, backward)(*parts)]

    def mean_of_groups(
        self, parts: Sequence[jax.Array], bucket_bytes: tuple[int, ...]
    ) -> list[jax.Array]:
        """The means over all groups of a replica's parts, with one all-reduce for each bucket.

        Args:
          parts: Parts of the mean gradients of the replica's group.
          bucket_bytes: Largest sizes of buckets.
        """
        means, peers = [*parts], self.groups.peers
        plan = plan_buckets(means, bucket_bytes=bucket_bytes, wire_dtype=self.wire_dtype)
        average = functools.partial(lax.pmean, axis_index_groups=peers)
        for bucket in plan.buckets:
            with jax.named_scope(BETWEEN):
                row = _joined([parts[i] for i in bucket.leaves]).astype(bucket.wire_dtype)
                row = mean_over(self.axis, row, average).astype(bucket.dtype)
            for i, x in zip(bucket.leaves, _cut(row[None], bucket.shapes), strict=True):
                means[i] = x[0]
        return means

    def _mean_parts(
        self, grads: Sequence[jax.Array], dims: Sequence[int], shapes: Sequence[Shape]
    ) -> list[jax.Array]:
        num, dtype = self.groups.size, grads[0].dtype
        with jax.named_scope(f"{UNIT}gradients"):
            divided = [_divided(x, dim, num) for x, dim in zip(grads, dims, strict=True)]
            rows = jnp.concatenate([x.reshape(num, -1) for x in divided], axis=1)
            narrow = self.wire_dtype is not None and self.wire_dtype.itemsize < dtype.itemsize
            rows = rows.astype(self.wire_dtype) if narrow else rows
            row = mean_over(self.axis, rows, self.average).astype(dtype)
        return [x[0] for x in _cut(row.reshape(1, -1), shapes)]


def forgotten(
    function: Function, forward: Function | None = None, backward: Function | None = None
) -> Function:
    """The function as one call, whose name shows to a policy that its results are not kept.

    Args:
      function: Function of arrays.
      forward: The forward pass, as of `jax.custom_vjp`; None for a call inside a forward pass,
        which is not differentiated.
      backward: The backward pass.
    """

    def call(*given: jax.Array) -> PyTree:
        return function(*given)

    call.__name__ = FORGOTTEN
    opaque = jax.custom_vjp(call)
    opaque.defvjp(forward or _never, backward or _never)
    return opaque


def _never(*_: PyTree) -> PyTree:
    raise AssertionError("a call inside a forward pass is not differentiated")


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in parts])


def _cut(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Arrays (replicas, ...) from rows in which they stand side by side."""
    ends = [*itertools.accumulate(map(math.prod, shapes))]
    pieces = jnp.split(rows, ends[:-1], axis=1)
    return [x.reshape(len(rows), *shape) for x, shape in zip(pieces, shapes, strict=True)]


def _merged(parts: jax.Array, dim: int) -> jax.Array:
    """A whole array, from the parts along a dim: (replicas, ...)."""
    num, *shape = parts.shape
    shape[dim] *= num
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _divided(x: jax.Array, dim: int, num: int) -> jax.Array:
    """The parts of a whole array along a dim, (replicas, ...); the inverse of `_merged`."""
    shape = (*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)
