"""Packings: forms in which gradients of a bucket are sent, and each replica's part of the mean.

    Packing          leaves as they are, or in one vector; each replica gets the whole mean
    ShardedLeaves    leaves cut into shards (`shards`); each replica gets its shard of the mean, and
                     an update in shards needs no more

Only some hooks can reduce the arrays of a packing, so `choose_packing` makes both. The packing of
logical replicas is `jddp.workbench.logical_replicas.RowsOfSums`.
"""

import dataclasses
import functools
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jddp.ground.errors import ConfigError, check_choice
from jddp.ground.numbers import add_in_pairs
from jddp.ground.typing import HookState, PyTree, Tree
from jddp.reduce.hooks import (
    ON_RESIZE,
    CommHook,
    GradBucket,
    TakeMean,
    leaves_of,
    mean_hook,
    narrow,
    split,
)
from jddp.reduce.plan import Bucket
from jddp.reduce.shards import Groups, own_shard, pack, shard_shape

BucketLayout = Literal["leaf", "flat"]
SMALL_BYTES = 64 * 1024  # Smaller leaves are packed: a copy costs less than a round of the network.
MANY = 64  # Limit of the leaves of a bucket that are packed where there is no network.
NOTES = {
    "leaf": ("layout leaf", "XLA fuses the buckets: all of them on CPUs, up to their size on GPUs"),
    "flat": ("layout flat",),
}


@dataclasses.dataclass(frozen=True)
class Packing:
    """Sends leaves as they are, or as one vector; a subclass sends another form.

    `pack` is passed one array's leaves at a time: `members` decides which leaves share one.

    Attributes:
      layout: Whether only the small leaves of a bucket share an array ("leaf"), or all ("flat").
      max_packed: Largest number of leaves that share an array in the leaf layout. If a bucket has
        more small leaves, all are sent alone.
      keeps_shards: Whether each replica gets only its shard of the mean.
    """

    layout: BucketLayout
    max_packed: float = math.inf
    keeps_shards: ClassVar[bool] = False

    def members(self, planned: Bucket) -> tuple[tuple[int, ...], ...]:
        """Returns the places of a bucket's leaves, in groups that share an array on the wire."""
        # Packing copies. A copy of a large leaf costs more than it saves where the compiler fuses
        # leaves itself; a small leaf alone would cost gloo a round of the network.
        limit = math.inf if self.layout == "flat" else SMALL_BYTES / planned.dtype.itemsize
        packed = [i for i, shape in enumerate(planned.shapes) if math.prod(shape) < limit]
        if self.layout == "leaf" and len(packed) > self.max_packed:
            packed = []
        alone = sorted({*range(len(planned.leaves))}.difference(packed))
        return ((tuple(packed),) if packed else ()) + tuple((i,) for i in alone)

    def pack(self, leaves: list[jax.Array], axis: str) -> jax.Array:
        """Returns the array in which leaves are sent: several as one vector."""
        if len(leaves) > 1 or self.layout == "flat":
            return jnp.concatenate([leaf.ravel() for leaf in leaves])
        return leaves[0]

    def unpack(self, bucket: GradBucket, axis: str) -> list[jax.Array]:
        """Returns the gradients of a bucket that has been reduced, in the order of the plan."""
        return bucket.leaves

    def alone(self, leaf: jax.Array, axis: str) -> jax.Array:
        """Returns the mean of a gradient that is in no bucket: it is the same on all replicas."""
        return leaf


class ShardedLeaves(Packing):
    """Cuts leaves to (replicas, shard); a replica gets its row of the mean, its `own_shard`."""

    keeps_shards = True

    def pack(self, leaves: list[jax.Array], axis: str) -> jax.Array:
        """Cuts the leaves, and puts them side by side."""
        return pack(leaves, lax.axis_size(axis))

    def unpack(self, bucket: GradBucket, axis: str) -> list[jax.Array]:
        """Cuts the replica's rows into its shards of the leaves."""
        num = lax.axis_size(axis)
        return leaves_of(bucket, lambda row, of: split(row, [shard_shape(x, num) for x in of]))

    def alone(self, leaf: jax.Array, axis: str) -> jax.Array:
        """Returns the replica's shard of the leaf."""
        return own_shard(leaf, axis)


# A packing, its hook, and the name of a custom hook: "" for none.
Packed = tuple[Packing, CommHook, str]


def choose_packing(
    layout: BucketLayout,
    hook: CommHook | None,
    platform: str = "",
    *,
    on_network: bool = True,
    is_sharded: bool = False,
) -> Packed:
    """Returns a packing, a hook for it (a checked custom hook, or the mean), and the hook's name.

    Args:
      layout: "leaf" or "flat".
      hook: A custom hook, or None.
      platform: The hardware.
      on_network: Whether the devices may be of several processes. On one process, packing many
        leaves saves less than it costs: XLA:CPU compiles a kernel for each leaf that is cut from a
        vector, but only one for each shape of leaves that are sent as they are.
      is_sharded: Whether a replica needs only its shard of the mean.

    Raises:
      ConfigError: If `hook` is no hook; in the step, if it returns a bucket or state of another
        form.
    """
    if hook is None and is_sharded:
        return ShardedLeaves(layout), narrow(mean_hook(average_of_shards(platform))), ""
    if hook is None:
        max_packed = math.inf if on_network or platform != "cpu" else MANY
        return Packing(layout, max_packed), narrow(mean_hook()), ""
    if not (isinstance(hook, CommHook) and callable(hook.init) and callable(hook.reduce)):
        raise ConfigError(
            f"The hook is {type(hook).__name__}. Give a jddp.CommHook(init, reduce) of functions."
        )
    check_choice("hook: on_resize", hook.on_resize, ON_RESIZE)
    # A custom hook promises the mean of whole leaves. Each replica takes its shard of that mean.
    name = getattr(hook.reduce, "__name__", repr(hook.reduce))
    return Packing(layout), _checked(narrow(hook), name), name


def average_of_shards(platform: str, groups: Groups | None = None) -> TakeMean:
    """Returns the function that takes each replica's row of a mean, on this hardware.

    Args:
      platform: The hardware.
      groups: Groups of replicas; each group takes a mean of its own. None for one group.
    """
    take = exchange_mean if platform == "cpu" else scatter_mean
    return take if groups is None else functools.partial(take, groups=groups.members)


def _checked(hook: CommHook, name: str) -> CommHook:
    def reduce(bucket: GradBucket, state: HookState, axis: str) -> tuple[GradBucket, HookState]:
        got = hook.reduce(bucket, state, axis)
        # A state of another form would fit neither the next step nor a checkpoint, and a bucket of
        # another form would be cut into wrong leaves.
        if _form(got) != (given := _form((bucket, state))):
            raise ConfigError(
                f"hook {name!r} returns {_form(got)}. It must return a bucket and a comm_state"
                f" of the structure, shapes and dtypes that it is given: {given}."
            )
        return got

    return hook._replace(reduce=reduce)


def _form(tree: PyTree) -> str:
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else str(x) for x in leaves]
    return f"{treedef} of {', '.join(arrays)}"


def scatter_mean(tree: Tree, axis: str, groups: list[list[int]] | None = None) -> Tree:
    """This replica's row of the mean over replicas, for each array of (replicas, shard).

    With `groups` it is the mean over the replicas of its group.
    """

    def mean(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, axis, axis_index_groups=groups) / len(x)

    return jax.tree.map(mean, tree)


def exchange_mean(tree: Tree, axis: str, groups: list[list[int]] | None = None) -> Tree:
    """Takes the same mean by sending each row to its replica, and adds in float32 at least.

    As many bytes are sent. Between processes XLA:CPU's reduce-scatter fails where one waits 30
    seconds for another (https://github.com/jax-ml/jax/issues/40831); an all-to-all waits.
    """

    def mean(x: jax.Array) -> jax.Array:
        rows = lax.all_to_all(
            x, axis, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=groups
        )
        # In half precision a small gradient would vanish next to a large partial sum. The wire
        # carries the wire dtype in any case.
        total = add_in_pairs(rows.astype(jnp.promote_types(x.dtype, jnp.float32)))
        return (total / len(x)).astype(x.dtype)

    return jax.tree.map(mean, tree)
