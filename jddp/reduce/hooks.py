"""Packings and communication hooks: how a bucket is sent, and how it becomes its mean.

    init(plan) -> comm_state                                    once, from the plan
    reduce(bucket, comm_state, axis) -> bucket, comm_state      inside the step, for each bucket

`mean_hook` is the default. `narrow` puts a smaller dtype on the wire, around any hook. A custom
hook sees each bucket as a pytree of arrays:

    def reduce(bucket, comm_state, axis):
        signs = jax.tree.map(jnp.sign, bucket)
        return jax.lax.pmean(signs, axis), comm_state

    jddp.Reduction(hook=jddp.CommHook(lambda plan: (), reduce))

`leaves` and `with_leaves` show a bucket as the gradients one by one. `powersgd` is a hook with
state.

A packing is the form in which gradients of a bucket are sent, and a replica's part of the mean:

    Packing          leaves as they are, or in one vector; each replica gets the whole mean
    ShardedLeaves    leaves cut into shards (`shards`); each replica gets its shard of the mean, and
                     an update in shards needs no more

Only some hooks can reduce the arrays of a packing, so `choose_packing` makes both. The packing of
logical replicas is `jddp.workbench.logical_replicas.RowsOfSums`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jddp.ground.errors import ConfigError, check_choice
from jddp.ground.typing import HookState, PyTree, Tree
from jddp.reduce.plan import Bucket, BucketPlan
from jddp.reduce.shards import Shape, exchange_on, own_shard, pack, shard_shape


@runtime_checkable
class TakeMean(Protocol):
    """Function that takes the mean of a tree of arrays over the replicas of an axis."""

    def __call__(self, tree: Tree, axis: str, /) -> Tree:
        """Returns the mean, or this replica's part of it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradBucket:
    """One replica's gradients of one bucket; a pytree of its arrays.

    Attributes:
      values: Arrays that are sent. The flat layout has one vector of all leaves; the leaf layout
        has one vector of the small leaves, and the large leaves as they are.
      planned: Paths, shapes and dtypes of the leaves.
      members: Leaves that each array of `values` holds, by their places in `planned`.
      index: Position of the bucket in the plan; buckets are reduced in this order.
      is_last: Whether the bucket is the last of the plan.
      scale: Factor from `values` to the gradients of this replica's mean loss, masked entries
        counted. `values` are gradients of a sum of losses: the global count divides in the end.
    """

    # Only `values` are leaves of the pytree. So a hook may map over a bucket as over any tree, and
    # branch on the rest in Python while it is traced.
    values: list[jax.Array]
    planned: Bucket = dataclasses.field(metadata={"static": True})
    members: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    index: int = dataclasses.field(metadata={"static": True})
    is_last: bool = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def leaves(self) -> list[jax.Array]:
        """The gradients one by one, in their shapes, in the order of `planned`."""
        return leaves_of(self, split)

    def with_leaves(self, leaves: Sequence[jax.Array]) -> "GradBucket":
        """The same bucket with other gradients, in the form of `leaves`."""
        values = [
            jnp.concatenate([leaves[i].ravel() for i in places]).reshape(value.shape)
            for places, value in zip(self.members, self.values, strict=True)
        ]
        return dataclasses.replace(self, values=values)


def leaves_of(
    bucket: GradBucket, split: Callable[[jax.Array, list[Shape]], list[jax.Array]]
) -> list[jax.Array]:
    """The leaves of a bucket, in the order of the plan: `split(value, shapes)` for each array."""
    shapes = bucket.planned.shapes
    leaves: dict[int, jax.Array] = {}
    for places, value in zip(bucket.members, bucket.values, strict=True):
        leaves |= zip(places, split(value, [shapes[i] for i in places]), strict=True)
    return [leaves[i] for i in range(len(shapes))]


def split(vector: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Cuts a vector into arrays of these shapes; one shape needs no cut."""
    ends = [*itertools.accumulate(map(math.prod, shapes))]
    pieces = jnp.split(vector, ends[:-1]) if ends[1:] else [vector]
    return [x.reshape(shape) for x, shape in zip(pieces, shapes, strict=True)]


class Units(NamedTuple):
    """The two factors between gradients of the summed loss and the gradients sent.

    Both are in the cotangent from which the backward pass starts. In the end the step divides by
    both, and by the mean count. A power of two costs no digit. In a step of 1,000 entries, whose
    summed loss has the gradient g:

        parameters                            float32    float16    float32    float16
        option loss_scale                     None       None       1,024      1,024
        -----------------------------------------------------------------------------
        backward_scale                        1          2^-10      2^-10      2^-10
        loss_scale                            1          1          2^10       2^10
        the backward pass starts from         1          2^-10      1          1
        on the wire                           g          2^-10 g    g          g
        GradBucket.scale there                1 / 1,000  1.024      1.024      1.024
        a custom hook is passed               g          2^-10 g    g          2^-10 g
        GradBucket.scale there                1 / 1,000  1.024      1 / 1,000  1.024
        in the end divided by, with the count 1          2^-10      1          1

    On the wire `GradBucket.scale` is static, and leaves out the loss scale, which is traced. A
    custom hook is passed the gradients that it would get without the option (`engine.guard`).

    Attributes:
      backward_scale: The largest power of two within 1 / `num_entries`, where sums of gradients
        could overflow float16 (parameters in float16, or a loss scale); else 1.
      loss_scale: The loss scale of the step; it may be traced.
      num_entries: Number of entries of the summed loss, masked entries counted.
    """

    backward_scale: float = 1.0
    loss_scale: float | jax.Array = 1.0
    num_entries: int = 1

    @property
    def cotangent(self) -> float | jax.Array:
        """The cotangent with which the backward pass starts; the step divides by it in the end."""
        return self.backward_scale * self.loss_scale

    @property
    def bucket_scale(self) -> float:
        """Factor from summed to mean gradients, without the loss scale."""
        return 1 / (self.num_entries * self.backward_scale)


PLAIN = Units()
ON_RESIZE = ("drop", "mean", "sum")


class CommHook(NamedTuple):
    """How the buckets of all replicas become their mean.

    Attributes:
      init: Function of the `BucketPlan` that returns the first hook state, a pytree of arrays;
        each replica keeps its own state.
      reduce: Function of one replica's bucket, the hook state and the axis. It returns the mean
        over the replicas, the same on all of them, and the new hook state.
      on_resize: Hook state of a run that resumes on another number of replicas: "drop" (the
        state of `init`), the "mean" of all states, or an equal share of their "sum" for each
        replica.
    """

    init: Callable[[BucketPlan], HookState]
    reduce: Callable[..., tuple[GradBucket, HookState]]
    on_resize: str = "drop"


def varies(x: jax.Array, axis: str) -> bool:
    """Whether the type of `x` shows that it varies over `axis`.

    Types show it under `shard_map`'s `check_vma=True`. Without the check no type does, not even
    the type of `lax.axis_index(axis)`.
    """
    kind = jax.typeof(x)
    varying = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # before JAX 0.10
    return axis in varying


def _pmean(tree: Tree, axis: str) -> Tree:
    # XLA:CPU would copy the arrays that a single replica sends to itself. Under check_vma=True the
    # type needs the collective even so.
    is_alone = jax.lax.axis_size(axis) == 1 and not varies(jax.lax.axis_index(axis), axis)
    return tree if is_alone else jax.lax.pmean(tree, axis)


def mean_hook(average: TakeMean = _pmean) -> CommHook:
    """Returns a hook without state that takes the exact mean, by `mean_over`."""

    def reduce(bucket: GradBucket, state: HookState, axis: str) -> tuple[GradBucket, HookState]:
        return mean_over(axis, bucket, average), state

    return CommHook(lambda plan: (), reduce)


def mean_over(axis: str, tree: Tree, average: TakeMean = _pmean) -> Tree:
    """The mean of a tree of arrays over the replicas of `axis`, by `lax.pmean` or `average`.

    float16 is scaled down on the wire, so that its sum fits where its mean does.
    """
    # float16 ends at 65,504, which a sum of N gradients may pass where their mean does not.
    small = power_of_two_within(1 / jax.lax.axis_size(axis))
    return _scale_float16(average(_scale_float16(tree, small), axis), 1 / small)


def _scale_float16(tree: Tree, scale: float) -> Tree:
    return jax.tree.map(lambda x: x * scale if x.dtype == np.float16 else x, tree)


def narrow(hook: CommHook) -> CommHook:
    """Casts the buckets of `hook` to the dtype that is planned for the wire, and back.

    Sums that float16 could not hold are scaled down on the wire, to no more than the gradient of
    the mean loss. The factor is a power of two, and costs no bit.
    """

    def reduce(bucket: GradBucket, state: HookState, axis: str) -> tuple[GradBucket, HookState]:
        planned = bucket.planned
        if planned.wire_dtype == planned.dtype:
            return hook.reduce(bucket, state, axis)
        # bfloat16 has the range of float32, and no sum overflows. float16 is scaled before the
        # cast: after it the sum would already be infinite.
        scale = power_of_two_within(bucket.scale) if planned.wire_dtype == np.float16 else 1.0
        sent = jax.tree.map(lambda x: (x * scale).astype(planned.wire_dtype), bucket)
        sent = dataclasses.replace(sent, scale=bucket.scale / scale)
        got, state = hook.reduce(sent, state, axis)
        # The cast comes before the division: `scale` is at most 1, so the quotient may overflow
        # float16.
        got = jax.tree.map(lambda x: x.astype(planned.dtype) / scale, got)
        if isinstance(got, GradBucket):  # Anything else is refused later, with the hook's name.
            got = dataclasses.replace(got, scale=bucket.scale)
        return got, state

    return hook._replace(reduce=reduce)


def power_of_two_within(scale: float) -> float:
    """The largest power of two that is no more than `scale`."""
    return 2.0 ** math.floor(math.log2(scale))


BucketLayout = Literal["leaf", "flat"]
SMALL_BYTES = 64 * 1024  # Smaller leaves are packed: a copy costs less than a round of the network.
MANY = 64  # Limit of the leaves of a bucket that are packed where there is no network.
NOTES = {
    "leaf": (
        "layout leaf",
        "XLA fuses the buckets: up to their size on GPUs, elsewhere all of them",
    ),
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
        return pack(leaves, jax.lax.axis_size(axis))

    def unpack(self, bucket: GradBucket, axis: str) -> list[jax.Array]:
        """Cuts the replica's rows into its shards of the leaves."""
        num = jax.lax.axis_size(axis)
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
        return ShardedLeaves(layout), narrow(mean_hook(exchange_on(platform).mean)), ""
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
