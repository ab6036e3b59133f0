"""Average a gradient tree over the replicas in a few large all-reduces.

A network with hundreds of small leaves pays one launch latency per leaf. Here leaves are grouped
into buckets, and each bucket is averaged by `lax.pmean`, in one of two layouts:

    leaf   the large leaves of a bucket are reduced as they are, the small ones as one vector; the
           compiler fuses what it is given
    flat   a bucket is packed into one vector, which is reduced by exactly one collective

XLA packs fused leaves on GPUs anyway, so `flat` costs nothing there and fixes the number of
collectives. On CPUs packing is a copy, dear for large leaves; but a collective makes one round of
the network for each array in it, dearer for small ones.

Buckets are reduced in one of two places:

    end    after the backward pass
    ready  inside the backward pass, each where its last gradient is made

XLA's scheduler is free to put off what nobody waits for, and would put off the reductions to the
end. So `ready` chains them by barriers into the backward pass: before the pass goes on, a bucket
must be packed and the one before it must have arrived. What the network does meanwhile is hidden.

This room knows trees of arrays and the name of one mesh axis, and nothing of models, meshes or
configs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jddp.errors import ConfigError
from jddp.reduce.backward import Backward, Evaluation
from jddp.reduce.hooks import CommHook, GradBucket
from jddp.reduce.parts import unpack
from jddp.reduce.plan import Bucket, BucketPlan, plan_buckets

PyTree = Any
Layout = Literal["leaf", "flat"]
Placement = Literal["end", "ready"]
SMALL_BYTES = 64 * 1024  # What the leaf layout packs: less to copy than a round costs to make.


@dataclass(frozen=True)
class Reduction:
    """How gradients become their mean over the replicas.

    Attributes:
      axis: Name of the mapped axis.
      bucket_bytes: Largest sizes of the buckets, first to last; the last repeats.
      last_bucket_bytes: That of the bucket that is complete last, if it is smaller.
      layout: "leaf" or "flat".
      placement: "end" or "ready".
      hook: What reduces a bucket.
      hook_name: Its name, for reports; "" for the mean.
      wire_dtype: What wider floats are narrowed to for the way.
    """

    axis: str
    bucket_bytes: tuple[int, ...]
    last_bucket_bytes: int | None
    layout: Layout
    placement: Placement
    hook: CommHook
    hook_name: str
    wire_dtype: np.dtype | None

    keeps_parts = False  # Whether each replica gets its part of the mean, and not all of it.

    def plan(
        self, tree: PyTree, ready: Sequence[int | None] | None = None, num_looped: int = 0
    ) -> BucketPlan:
        """Plans buckets for gradients like `tree`, which are finished at `ready` if that is known.

        Args:
          tree: Gradients, or their shapes and dtypes.
          ready: `Backward.ready`.
          num_looped: `Backward.num_looped`.

        Raises:
          ConfigError: If a leaf is not a floating or complex array.
        """
        plan = plan_buckets(
            tree,
            bucket_bytes=self.bucket_bytes,
            last_bucket_bytes=self.last_bucket_bytes,
            ready=ready,
            wire_dtype=self.wire_dtype,
        )
        order = "as the backward pass finishes them" if ready else "last leaf first, by guess"
        notes = [f"order: {order}", f"layout {self.layout}, placement {self.placement}"]
        if self.layout == "leaf":
            notes.append("XLA fuses the buckets: all of them on CPUs, up to their size on GPUs")
        if self.hook_name:
            notes.append(f"what of these bytes is sent is for comm_hook {self.hook_name!r} to say")
        if num_looped and self.placement == "ready":
            notes.append(f"{num_looped} gradients leave a loop at once: they are ready at its end")
        return replace(plan, notes=tuple(notes))

    def at_end(
        self, grads: PyTree, comm_state: PyTree, *, plan: BucketPlan, scale: float = 1.0
    ) -> tuple[PyTree, PyTree]:
        """Averages complete gradients, one bucket after the other.

        Args:
          grads: This replica's, of the structure that `plan` was made for.
          comm_state: The hook's.
          plan: From `plan`.
          scale: What makes the gradients those of a mean loss (`GradBucket.scale`).

        Returns:
          A tree like `grads`, the same on every replica; and the hook's new state.
        """
        leaves, treedef = jax.tree.flatten(grads)
        for index, planned in enumerate(plan.buckets):
            bucket = self._pack([leaves[i] for i in planned.leaves], plan, index, scale)
            bucket, comm_state = self._reduce(bucket, comm_state)
            self._unpack_into(leaves, bucket)
        for i in _unsent(leaves, plan):
            leaves[i] = self._without(leaves[i])
        return jax.tree.unflatten(treedef, leaves), comm_state

    def when_ready(
        self,
        backward: Backward,
        comm_state: PyTree,
        *,
        plan: BucketPlan,
        scale: float,
        so_far: PyTree = None,
    ) -> tuple[PyTree, PyTree]:
        """Runs a backward pass, and averages each bucket where its last gradient is made.

        Args:
          backward: The pass, traced.
          comm_state: The hook's.
          plan: From `plan`.
          scale: What makes the gradients those of a mean loss (`GradBucket.scale`).
          so_far: Gradients of the parts of the batch before this one, to which the pass adds.

        Returns:
          As `at_end`.
        """
        run = Evaluation(backward)
        num_leaves = len(backward.ready)
        added = [None] * num_leaves if so_far is None else jax.tree.leaves(so_far)
        leaves: list[Any] = [None] * num_leaves
        arrived: GradBucket | None = None
        for index, planned in enumerate(plan.buckets):
            moved = run.advance(max(backward.ready[i] or 0 for i in planned.leaves))
            grads = _add(run.gradients(planned.leaves), [added[i] for i in planned.leaves])
            bucket = self._pack(grads, plan, index, scale)
            # Two buckets that are complete at once hold the pass up only once.
            crossing = run.crossing if moved else {}
            bucket, values, arrived = lax.optimization_barrier(
                (bucket, [*crossing.values()], arrived)
            )
            run.replace(dict(zip(crossing, values, strict=True)))
            if arrived is not None:
                self._unpack_into(leaves, arrived)
            arrived, comm_state = self._reduce(bucket, comm_state)
        run.advance()
        if arrived is not None:
            self._unpack_into(leaves, arrived)
        unsent = _unsent(leaves, plan)
        for i, leaf in zip(unsent, run.gradients(unsent), strict=True):
            leaves[i] = self._without(leaf)
        return jax.tree.unflatten(backward.treedef, leaves), comm_state

    def gather(self, parts: PyTree, like: PyTree, *, plan: BucketPlan) -> PyTree:
        """Puts the parts of all replicas together, with one all-gather where one array was reduced.

        Args:
          parts: Of arrays that were cut by `own_part`.
          like: The arrays, for their shapes.
          plan: From `plan`.

        Returns:
          A tree like `like`, the same on every replica.
        """
        leaves, treedef = jax.tree.flatten(parts)
        shapes = [x.shape for x in jax.tree.leaves(like)]
        sent = [
            [planned.leaves[i] for i in members]
            for planned in plan.buckets
            for members in self._arrays(planned)
        ]
        for members in (*sent, *([i] for i in _unsent(leaves, plan))):
            with jax.named_scope("parameters"):
                row = jnp.concatenate([leaves[i].ravel() for i in members])
                rows = lax.all_gather(row, self.axis)
            arrays = unpack(rows, [shapes[i] for i in members])
            for i, array in zip(members, arrays, strict=True):
                leaves[i] = array
        return jax.tree.unflatten(treedef, leaves)

    def _pack(self, leaves: list[Any], plan: BucketPlan, index: int, scale: float) -> GradBucket:
        planned, is_last = plan.buckets[index], index == len(plan) - 1
        members = self._arrays(planned)
        values = [self._in_one([leaves[i] for i in places]) for places in members]
        return GradBucket(values, planned, members, index, is_last, scale)

    def _in_one(self, leaves: list[Any]) -> Any:
        """The array in which some leaves travel."""
        if len(leaves) > 1 or self.layout == "flat":
            return jnp.concatenate([leaf.ravel() for leaf in leaves])
        return leaves[0]

    def _arrays(self, planned: Bucket) -> tuple[tuple[int, ...], ...]:
        """Which leaves of a bucket share an array on the way, by their places in it."""
        limit = math.inf if self.layout == "flat" else SMALL_BYTES / planned.dtype.itemsize
        alone = [(i,) for i, shape in enumerate(planned.shapes) if math.prod(shape) >= limit]
        packed = tuple(i for i in range(len(planned.leaves)) if (i,) not in alone)
        return (packed, *alone) if packed else tuple(alone)

    def _unpack_into(self, leaves: list[Any], bucket: GradBucket) -> None:
        for position, leaf in zip(bucket.planned.leaves, bucket.leaves, strict=True):
            leaves[position] = leaf

    def _without(self, leaf: Any) -> Any:
        """The mean of a gradient that is in no bucket, since it is alike on all replicas."""
        return leaf

    def _reduce(self, bucket: GradBucket, comm_state: PyTree) -> tuple[GradBucket, PyTree]:
        given = (bucket, comm_state)
        # The name by which profiles and compiled programs show it.
        with jax.named_scope(f"bucket_{bucket.index}"):
            got = self.hook.reduce(*given, self.axis)
        if _form(got) != _form(given):
            raise ConfigError(
                f"comm_hook {self.hook_name!r} returns {_form(got)}. It must return a bucket and a "
                f"comm_state of the structure, shapes and dtypes that it is given: {_form(given)}."
            )
        return got


def _unsent(leaves: list[Any], plan: BucketPlan) -> list[int]:
    sent = {i for planned in plan.buckets for i in planned.leaves}
    return [i for i in range(len(leaves)) if i not in sent]


def _form(tree: PyTree) -> str:
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else str(x) for x in leaves]
    return f"{treedef} of {', '.join(arrays)}"


def _add(grads: list[Any], so_far: list[Any]) -> list[Any]:
    """Sums, in the dtypes of the gradients; `so_far` may be more precise."""
    return [
        g if s is None else (g.astype(s.dtype) + s).astype(g.dtype)
        for g, s in zip(grads, so_far, strict=True)
    ]
