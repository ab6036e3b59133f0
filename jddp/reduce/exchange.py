"""Rows exchanged between replicas, in the form that the compiler of the hardware leaves as it is.

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

import jax
import jax.numpy as jnp

from jddp.ground.numbers import add_in_pairs
from jddp.ground.typing import Tree
from jddp.reduce.shards import Groups

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
