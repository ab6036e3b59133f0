"""Communication hooks: how a bucket becomes its mean, as two functions in optax's style.

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
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddp.ground.typing import HookState, Tree
from jddp.reduce.plan import Bucket, BucketPlan
from jddp.reduce.shards import Shape


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
    is_alone = lax.axis_size(axis) == 1 and not varies(lax.axis_index(axis), axis)
    return tree if is_alone else lax.pmean(tree, axis)


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
    small = power_of_two_within(1 / lax.axis_size(axis))
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
