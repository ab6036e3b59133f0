"""The packing of logical replicas: rows of sums, whose mean over all replicas is in one order.

packing, hook, _ = pack_rows("leaf", num=8)
"""

import dataclasses
from typing import final

import jax
from jax import lax

from jddp.ground.typing import HookState
from jddp.reduce.hooks import CommHook, GradBucket, leaves_of
from jddp.reduce.packing import BucketLayout, Members, Packed, members_of
from jddp.reduce.plan import Bucket
from jddp.reduce.shards import add_in_pairs, pack, unpack


@final
@dataclasses.dataclass(frozen=True)
class RowsOfSums:
    """Rows of sums, cut to (rows, replicas, shard); each replica gets their whole mean.

    A barrier keeps the compiler from fusing the mean with its uses: the fusion, and so the last
    bit, would depend on the number of rows.

    Attributes:
      layout: "leaf" or "flat".
    """

    layout: BucketLayout
    keeps_shards = False

    def members(self, planned: Bucket) -> Members:
        """Lets small leaves share an array, or in the flat layout all."""
        return members_of(planned, self.layout)

    def pack(self, leaves: list[jax.Array], axis: str) -> jax.Array:
        """Cuts each row of the leaves, side by side."""
        return jax.vmap(lambda *rows: pack(rows, lax.axis_size(axis)))(*leaves)

    def unpack(self, bucket: GradBucket, axis: str) -> list[jax.Array]:
        """Puts the leaves together from the rows of all replicas."""
        return lax.optimization_barrier(leaves_of(bucket, unpack))

    def alone(self, leaf: jax.Array, axis: str) -> jax.Array:
        """Returns one of the rows, which are equal."""
        return leaf[0]


def pack_rows(layout: BucketLayout, num: int) -> Packed:
    """Rows of sums of `num` gradients in all, and a hook that makes their mean in one order.

    Each replica gets its shard of all rows, continues the sum where they end, and then all shards
    are gathered: the bytes of an all-reduce in a ring where each replica has one row.
    """

    def reduce(bucket: GradBucket, state: HookState, axis: str) -> tuple[GradBucket, HookState]:
        def mean(x: jax.Array) -> jax.Array:
            # Not an all-reduce: NCCL and gloo add in an order that depends on the number of
            # devices.
            rows = lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)
            return lax.all_gather(add_in_pairs(rows[:, 0]) / num, axis)

        return jax.tree.map(mean, bucket), state

    return RowsOfSums(layout), CommHook(lambda plan: (), reduce), ""
