"""Average a gradient tree over the replicas in a few large all-reduces.

A network with hundreds of small leaves pays one launch latency per leaf. Here leaves are grouped
into buckets, and each bucket is averaged by `lax.pmean`, in one of two layouts:

    leaf   the large leaves of a bucket are reduced as they are, the small ones as one vector; the
           compiler fuses them
    flat   a bucket is packed into one vector, which is reduced by exactly one collective

XLA packs fused leaves on GPUs anyway, so `flat` costs nothing there and fixes the number of
collectives. On CPUs packing is a copy, which is expensive for large leaves. But a collective makes
one round of the network for each array in it, which costs more for small leaves.

One loop reduces the buckets, each where its last gradient is made. The gradients decide whether
that is after the backward pass or inside it (`backward`).

This room knows trees of arrays and the name of one mesh axis, and nothing of models, meshes or
configs.

The meaning of "auto" on each kind of hardware is decided here. XLA merges separate collectives
unless an option forbids it: `compiler_options` returns these options for one function.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jddp.ground.errors import ConfigError, check_choice
from jddp.ground.typing import MEBIBYTE, Grads, HookState, Params, PyTree
from jddp.reduce import hooks
from jddp.reduce.backward import Finished, Gradients
from jddp.reduce.hooks import BucketLayout, CommHook, GradBucket, Packing, Units, choose_packing
from jddp.reduce.plan import BucketPlan, plan_buckets
from jddp.reduce.shards import VECTORS, Exchange, Shape, unpack


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
      seen: Function of a custom hook and the units of a step that returns the hook to call; None
        for the hook itself.
      is_divided: Function of a leaf's shape: whether the leaf is in no bucket, since it has been
        averaged already; None if all leaves are sent.
      exchange: How shards are gathered.
    """

    axis: str
    bucket_bytes: tuple[int, ...]
    packing: Packing
    hook: CommHook
    hook_name: str
    wire_dtype: np.dtype | None
    seen: Callable[[CommHook, Units], CommHook] | None = None
    is_divided: Callable[[Shape], bool] | None = None
    exchange: Exchange = VECTORS

    def plan(self, tree: PyTree, ready: Sequence[int | None] | None = None) -> BucketPlan:
        """Plans buckets for gradients like `tree`, in the order in which they are finished.

        Args:
          tree: Gradients, or their shapes and dtypes.
          ready: Order in which gradients are finished, `Backward.ready`; None if it is unknown.

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
        notes = [f"order: {order}", *hooks.NOTES[self.packing.layout]]
        if self.hook_name:
            notes.append(f"hook {self.hook_name!r} decides what of these bytes is sent")
        return plan.noted(*notes)

    def __call__(
        self, grads: Gradients, comm_state: HookState, plan: BucketPlan, units: Units = hooks.PLAIN
    ) -> tuple[Grads, HookState]:
        """Averages gradients bucket by bucket, each where its last gradient is finished.

        Args:
          grads: Gradients of this replica, in the structure of the plan.
          comm_state: State of the hook.
          plan: The buckets.
          units: Factors of the gradients.

        Returns:
          A tree like `grads`, the same on every replica; and the hook's new state.
        """
        run, hook = grads.start(), self.hook
        # The mean is linear: a loss scale passes through it. A custom hook may be nonlinear, or
        # have state of other steps, so it is called without the scale.
        if self.seen is not None and self.hook_name:
            hook = self.seen(hook, units)
        done: dict[int, jax.Array] = {}
        flying: list[GradBucket] = []
        # All replicas follow the order of the plan, because each collective needs all of them. The
        # hook state passes from bucket to bucket.
        for index, planned in enumerate(plan.buckets):
            leaves, members = run.take(planned.leaves), self.packing.members(planned)
            arrays = [self.packing.pack([leaves[i] for i in x], self.axis) for x in members]
            is_last = index == len(plan) - 1
            bucket = GradBucket(arrays, planned, members, index, is_last, units.bucket_scale)
            # The previous bucket is unpacked only after this barrier. Unpacking it at once would
            # make the backward pass wait for the network.
            bucket, flying = run.hold(bucket, flying)
            done |= self._arrived(flying)
            # Profiles and compiled programs show this name.
            with jax.named_scope(f"bucket_{index}"):
                bucket, comm_state = hook.reduce(bucket, comm_state, self.axis)
            flying = [bucket]
        # The leaves in no bucket are gradients that are zero on every replica: nothing is sent for
        # them.
        rest = run.rest({i for planned in plan.buckets for i in planned.leaves})
        done |= self._arrived(flying)
        done |= {i: self.packing.alone(x, self.axis) for i, x in rest.items()}
        return jax.tree.unflatten(grads.treedef, [done[i] for i in sorted(done)]), comm_state

    def gather(self, shards: Params, like: Params, plan: BucketPlan) -> Params:
        """Gathers the shards of all replicas, with one all-gather for each array that was reduced.

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
        # Shards are gathered in the same groups in which gradients were sent, so that there are as
        # few collectives and latencies. Arrays without a gradient follow one by one.
        for members in (*sent, *([i] for i in sorted({*range(len(leaves))}.difference(*sent)))):
            with jax.named_scope("parameters"):
                row = jnp.concatenate([leaves[i].ravel() for i in members])
                rows = self.exchange.gather(row, self.axis)
            arrays = unpack(rows, [shapes[i] for i in members])
            for i, array in zip(members, arrays, strict=True):
                leaves[i] = array
        return jax.tree.unflatten(treedef, leaves)

    def _arrived(self, flying: list[GradBucket]) -> dict[int, jax.Array]:
        """The gradients of buckets, by their positions in the tree."""
        done: dict[int, jax.Array] = {}
        for x in flying:
            done |= zip(x.planned.leaves, self.packing.unpack(x, self.axis), strict=True)
        return done


GPUS = ("gpu", "cuda", "rocm")
# TPUs v5p, v6e and 7x, which reduce arrays in sparse cores while the other cores compute.
SPARSE_CORES = ("TPU v5", "TPU v6 lite", "TPU7x")
# A small first bucket is complete early, so that the network is busy from nearly the beginning of
# the backward pass. PyTorch DDP's first bucket is 1 MiB for that reason.
BUCKET_MB = (1, 25)


def bucket_sizes(bucket_mb: float | Sequence[float]) -> tuple[int, ...]:
    """Returns the largest sizes of the buckets, in bytes; the last one repeats.

    Args:
      bucket_mb: Size of the buckets, or sizes of the first, the second, ..., in MiB.

    Raises:
      ConfigError: If one is not positive.
    """
    sizes = [bucket_mb] if isinstance(bucket_mb, int | float) else list(bucket_mb)
    if not sizes or min(sizes) <= 0:
        raise ConfigError(
            f"A bucket holds at least one byte: got bucket_mb={bucket_mb}. Give positive sizes, in "
            "MiB."
        )
    return tuple(max(1, int(size * MEBIBYTE)) for size in sizes)


def average_gradients(
    axis: str = "data",
    bucket_mb: float | Sequence[float] = BUCKET_MB,
    layout: str = "auto",
    *,
    wire_dtype: jax.typing.DTypeLike | None = None,
    comm_hook: CommHook | None = None,
) -> optax.GradientTransformation:
    """Returns an optax transformation that averages gradients over `axis`, bucket by bucket.

    Put it first in a chain, inside your own `pmap` or `shard_map` step; `jddp.DataParallel` uses
    the same buckets.

        optimizer = optax.chain(jddp.average_gradients("batch"), optax.adamw(1e-3))

    Under `shard_map` build the step with `check_vma=False`, or take the gradient at
    `jax.lax.pcast(params, axis, to="varying")`: without either, JAX has already summed
    the gradients of replicated parameters, and they are refused. examples/bring_your_own_step.py
    shows both, and `pmap`.

    Args:
      axis: Name of the mapped axis.
      bucket_mb: Largest size of a bucket, in MiB; or sizes of the first, the second, ...: the last
        one repeats.
      layout: "leaf", "flat", or "auto": flat on GPUs and TPUs with sparse cores, leaf elsewhere.
      wire_dtype: Dtype to which wider gradients are cast on the wire: "bfloat16" or "float16".
      comm_hook: A `CommHook` that reduces a bucket, in place of the mean. Each replica has its own
        hook state.

    Raises:
      ConfigError: If an option breaks its rule; in `update`, if gradients are already the same on
        all replicas.
    """
    chosen, _ = choose_layout(layout, False, lambda: jax.devices()[0])
    name = wire_dtype if isinstance(wire_dtype, str | None) else jnp.dtype(wire_dtype).name
    check_choice("wire_dtype", name, ("bfloat16", "float16", None))
    dtype = None if name is None else jnp.dtype(name)
    reducer = Reducer(axis, bucket_sizes(bucket_mb), *choose_packing(chosen, comm_hook), dtype)

    def init(params: Params) -> HookState:
        # Stateless hooks need no plan, and then any tree will do.
        return reducer.hook.init(reducer.plan(params))

    def update(updates: Grads, state: HookState, params: Params = None) -> tuple[Grads, HookState]:
        # Under check_vma=True an axis index has a varying type. Without the check no type varies,
        # and autodiff leaves the gradients of each replica as they are.
        is_checked = hooks.varies(jax.lax.axis_index(axis), axis)
        if is_checked and not all(hooks.varies(x, axis) for x in jax.tree.leaves(updates)):
            raise ConfigError(
                f"average_gradients: these gradients are already the same over {axis!r}: under "
                "shard_map's check_vma=True JAX sums gradients of replicated parameters, and "
                "their mean would be N times too large. Build the step with check_vma=False, or "
                f"take the gradient at jax.lax.pcast(params, {axis!r}, to='varying')."
            )
        return reducer(Finished(updates), state, reducer.plan(updates))

    return optax.GradientTransformation(init, update)


def choose_layout(
    layout: str, overlap: bool | str, device: Callable[[], jax.Device]
) -> tuple[BucketLayout, bool]:
    """Resolves "auto"; returns a layout, and whether buckets are sent inside the backward pass.

    Args:
      layout: "leaf", "flat" or "auto".
      overlap: True, False or "auto".
      device: Function that returns one of the devices.

    Raises:
      ConfigError: If the layout is unknown.
    """
    check_choice("layout", layout, ("auto", *get_args(BucketLayout)))
    # `device` is called only where the answer matters: it starts JAX's backend.
    can_overlap = "auto" in (layout, overlap) and _computes_while_it_sends(device())
    if overlap == "auto":
        overlap = can_overlap and layout != "leaf"
    if layout == "auto":
        layout = "flat" if can_overlap or overlap else "leaf"
    return cast(BucketLayout, layout), bool(overlap)


def _computes_while_it_sends(device: jax.Device) -> bool:
    return device.platform in GPUS or device.device_kind in SPARSE_CORES


def compiler_options(reducer: Reducer, device: jax.Device) -> dict[str, bool | int | str]:
    """Returns options for `jax.jit` that make XLA leave the buckets as they are.

    On GPUs the combiner merges all-reduces up to 30 MiB: its threshold becomes 0 for flat buckets
    and the bucket size for single leaves. On CPUs one pass merges all of them: it is switched off
    for flat buckets, and left on to fuse single leaves; and a finer analysis avoids copies of
    donated parameters. On TPUs with sparse cores these reduce flat buckets; on others all-reduces
    are synchronous, and XLA merges the buckets into one. A flag that the user has set in
    `XLA_FLAGS` or `LIBTPU_INIT_ARGS` wins.
    """
    packing = reducer.packing
    is_flat = packing.layout == "flat"
    options: dict[str, bool | int | str] = {}
    if device.platform == "cpu":
        options["xla_cpu_copy_insertion_use_region_analysis"] = True
        # Merged buckets would all wait for the last bucket.
        if is_flat:
            options["xla_disable_hlo_passes"] = "cpu-all-reduce-combiner"
    elif device.device_kind in SPARSE_CORES and is_flat:
        options["xla_tpu_enable_sparse_core_collective_offload_all_reduce"] = True
    elif device.platform in GPUS:
        # The last size repeats: all buckets except the first few have it.
        threshold = 0 if is_flat else reducer.bucket_bytes[-1]
        # ZeRO-1 sends shards of gradients and gathers parameters. XLA has other thresholds for
        # these collectives.
        kinds = ("reduce_scatter", "all_gather") if packing.keeps_shards else ("all_reduce",)
        for kind in kinds:
            options[f"xla_gpu_{kind}_combine_threshold_bytes"] = threshold
        if reducer.is_divided is not None:  # Units are packed in any layout.
            for kind in ("reduce_scatter", "all_gather"):
                options[f"xla_gpu_{kind}_combine_threshold_bytes"] = 0
    return unless_set(options)


def unless_set(options: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
    """Returns options of a compiled function, except flags that the user has set."""
    # An option would replace the flag with its name.
    set_by_user = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    return {name: value for name, value in options.items() if name not in set_by_user}
