"""Average a gradient tree over the replicas in a few large all-reduces.

A network with hundreds of small leaves pays one launch latency per leaf. Here leaves are grouped
into buckets, and each bucket is averaged by `lax.pmean`, in one of two layouts:

    leaf   the large leaves of a bucket are reduced as they are, the small ones as one vector; the
           compiler fuses what it is given
    flat   a bucket is packed into one vector, which is reduced by exactly one collective

XLA packs fused leaves on GPUs anyway, so `flat` costs nothing there and fixes the number of
collectives. On CPUs packing is a copy, dear for large leaves; but a collective makes one round of
the network for each array in it, dearer for small ones.

One loop reduces the buckets, after the backward pass or inside it, each where its last gradient is
made: which of the two, the gradients decide (`gradients`).

This room knows trees of arrays and the name of one mesh axis, and nothing of models, meshes or
configs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddp.reduce.gradients import Gradients
from jddp.reduce.hooks import PLAIN, CommHook, GradBucket, Units, as_is
from jddp.reduce.packing import NOTES, Packing
from jddp.reduce.plan import BucketPlan, plan_buckets
from jddp.reduce.shards import Shape, unpack
from jddp.typing import Grads, HookState, Leaf, Params, PyTree


@dataclass(frozen=True)
class Reducer:
    """How gradients become their mean over the replicas.

    Attributes:
      axis: Name of the mapped axis.
      bucket_bytes: Largest sizes of the buckets, first to last; the last repeats.
      packing: Form in which a bucket is sent.
      hook: Hook that reduces packed buckets.
      hook_name: Name of a custom hook, for reports; "" for the mean.
      wire_dtype: Dtype to which wider floats are cast on the wire, or None.
      seen: Function of the hook and the units of a step that returns the hook to call.
      is_divided: Function of a leaf's shape: whether it is in no bucket, since it has been averaged
        where it was made; None where all leaves are sent.
    """

    axis: str
    bucket_bytes: tuple[int, ...]
    packing: Packing
    hook: CommHook
    hook_name: str
    wire_dtype: np.dtype | None
    seen: Callable[[CommHook, Units], CommHook] = as_is
    is_divided: Callable[[Shape], bool] | None = None

    def plan(self, tree: PyTree, ready: Sequence[int | None] | None = None) -> BucketPlan:
        """Plans buckets for gradients like `tree`, which are finished at `ready` if that is known.

        Args:
          tree: Gradients, or their shapes and dtypes.
          ready: Order in which gradients are finished, `Backward.ready`; None where it is unknown.

        Raises:
          ConfigError: If a leaf is not a floating or complex array.
        """
        plan = plan_buckets(
            tree,
            bucket_bytes=self.bucket_bytes,
            ready=ready,
            wire_dtype=self.wire_dtype,
            is_left_out=self.is_divided,
        )
        order = "as the backward pass finishes them" if ready else "last leaf first, by guess"
        notes = [f"order: {order}", *NOTES[self.packing.layout]]
        if self.hook_name:
            notes.append(f"hook {self.hook_name!r} decides what of these bytes is sent")
        return plan.noted(*notes)

    def __call__(
        self, grads: Gradients, comm_state: HookState, plan: BucketPlan, units: Units = PLAIN
    ) -> tuple[Grads, HookState]:
        """Averages gradients, one bucket after the other, each where its last one is finished.

        Args:
          grads: Gradients of this replica, of the structure that was planned for.
          comm_state: State of the hook.
          plan: The buckets.
          units: Factors of the gradients.

        Returns:
          A tree like `grads`, the same on every replica; and the hook's new state.
        """
        run, hook = grads.start(), self.seen(self.hook, units)
        done: dict[int, Leaf] = {}
        flying: list[GradBucket] = []
        # One order for all replicas, that of the plan: a collective waits for the same one
        # everywhere. The hook state passes from bucket to bucket.
        for index, planned in enumerate(plan.buckets):
            bucket = self._pack(run.take(planned.leaves), plan, index, units.bucket_scale)
            # The bucket before is unpacked only after this barrier: unpacked where it was sent, it
            # would make the backward pass wait for the network.
            bucket, flying = run.hold(bucket, flying)
            done |= self._arrived(flying)
            # The name by which profiles and compiled programs show it.
            with jax.named_scope(f"bucket_{index}"):
                bucket, comm_state = hook.reduce(bucket, comm_state, self.axis)
            flying = [bucket]
        # Leaves in no bucket: gradients that are zero on every replica, so that nothing is sent for
        # them.
        rest = run.rest({i for planned in plan.buckets for i in planned.leaves})
        done |= self._arrived(flying)
        done |= {i: self.packing.alone(x, self.axis) for i, x in rest.items()}
        return jax.tree.unflatten(grads.treedef, [done[i] for i in sorted(done)]), comm_state

    def gather(self, shards: Params, like: Params, plan: BucketPlan) -> Params:
        """Gathers the shards of all replicas, with one all-gather where one array was reduced.

        Args:
          shards: Shards of arrays, as `own_shard` cuts them.
          like: The whole arrays, for their shapes.
          plan: The buckets.

        Returns:
          A tree like `like`, the same on every replica.
        """
        leaves, treedef = jax.tree.flatten(shards)
        shapes = [x.shape for x in jax.tree.leaves(like)]
        sent = [
            [planned.leaves[i] for i in members]
            for planned in plan.buckets
            for members in self.packing.members(planned)
        ]
        # Shards are gathered in the groups in which gradients were sent: as few collectives, and as
        # few latencies. Arrays without a gradient follow one by one.
        for members in (*sent, *([i] for i in sorted({*range(len(leaves))}.difference(*sent)))):
            with jax.named_scope("parameters"):
                row = jnp.concatenate([leaves[i].ravel() for i in members])
                rows = lax.all_gather(row, self.axis)
            arrays = unpack(rows, [shapes[i] for i in members])
            for i, array in zip(members, arrays, strict=True):
                leaves[i] = array
        return jax.tree.unflatten(treedef, leaves)

    def _pack(self, leaves: list[Leaf], plan: BucketPlan, index: int, scale: float) -> GradBucket:
        planned, is_last = plan.buckets[index], index == len(plan) - 1
        members = self.packing.members(planned)
        values = [self.packing.pack([leaves[i] for i in places], self.axis) for places in members]
        return GradBucket(values, planned, members, index, is_last, scale)

    def _arrived(self, flying: list[GradBucket]) -> dict[int, Leaf]:
        """The gradients of buckets, by their positions in the tree."""
        done: dict[int, Leaf] = {}
        for x in flying:
            done |= zip(x.planned.leaves, self.packing.unpack(x, self.axis), strict=True)
        return done
