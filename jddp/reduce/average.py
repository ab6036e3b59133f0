"""Average a gradient tree over the replicas in a few large all-reduces.

A network with hundreds of small leaves pays one launch latency per leaf. Here leaves are grouped
into buckets, and each bucket is averaged by `lax.pmean`, in one of two layouts:

    leaf   the leaves of a bucket are reduced as they are; the compiler fuses them
    flat   a bucket is packed into one vector, which is reduced by exactly one collective

XLA packs fused leaves on GPUs anyway, so `flat` costs nothing there and fixes the number of
collectives; on CPUs packing is a copy that `leaf` saves. XLA also merges collectives that it was
given apart, unless it is told not to: `compiler_options` says it, per function.

This room knows trees of arrays and the name of one mesh axis, and nothing of models, meshes or
configs.
"""

import itertools
import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jddp.errors import ConfigError
from jddp.reduce.plan import MEBIBYTE, Bucket, BucketPlan, plan_buckets

PyTree = Any
Layout = Literal["leaf", "flat"]


def average_gradients(
    axis: str = "data",
    bucket_mb: float = 25,
    layout: str = "auto",
    *,
    first_bucket_mb: float = 1,
) -> optax.GradientTransformation:
    """Returns an optax transformation that averages gradients over `axis`, bucket by bucket.

    Put it first in a chain, inside one's own `pmap` or `shard_map` step; `jddp.DataParallel` uses
    the same transformation.

        optimizer = optax.chain(jddp.average_gradients("batch"), optax.adamw(1e-3))

    Under `shard_map` the step must be built with `check_vma=False`: with the check on, JAX has
    already summed the gradients of replicated parameters.

    Args:
      axis: Name of the mapped axis.
      bucket_mb: Largest size of a bucket, in MiB.
      layout: "leaf", "flat", or "auto": flat on GPUs, leaf elsewhere.
      first_bucket_mb: Largest size of the first bucket, in MiB, capped by `bucket_mb`.

    Raises:
      ConfigError: If a size is not positive or the layout is unknown.
    """
    chosen = resolve_layout(layout, jax.default_backend)

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None) -> Any:
        del params
        plan = plan_gradients(updates, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb)
        return pmean_buckets(updates, plan, axis=axis, layout=chosen), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def plan_gradients(tree: PyTree, *, bucket_mb: float, first_bucket_mb: float) -> BucketPlan:
    """Plans buckets from sizes in MiB, as `average_gradients` does."""
    return plan_buckets(
        tree,
        bucket_bytes=int(bucket_mb * MEBIBYTE),
        first_bucket_bytes=int(first_bucket_mb * MEBIBYTE),
    )


def resolve_layout(layout: str, platform: Any) -> Layout:
    """Returns "leaf" or "flat"; `platform()` names the hardware when `layout` is "auto".

    Raises:
      ConfigError: If `layout` is none of "auto", "leaf" and "flat".
    """
    if layout == "auto":
        return "flat" if platform() in ("gpu", "cuda", "rocm") else "leaf"
    if layout not in ("leaf", "flat"):
        raise ConfigError(f"layout {layout!r} is unknown. Choose 'auto', 'leaf' or 'flat'.")
    return layout  # type: ignore[return-value]  # narrowed by the test above


def pmean_buckets(tree: PyTree, plan: BucketPlan, *, axis: str, layout: Layout) -> PyTree:
    """Averages the leaves of `tree` over `axis`, one bucket after the other.

    Args:
      tree: This replica's gradients, of the structure that `plan` was made for.
      plan: From `plan_buckets`.
      axis: Name of the mapped axis.
      layout: "leaf" or "flat"; the numbers are the same.

    Returns:
      A tree like `tree`, the same on every replica.
    """
    average = _pmean_flat if layout == "flat" else _pmean_leaves
    leaves, treedef = jax.tree.flatten(tree)
    for bucket in plan.buckets:
        averaged = average([leaves[i] for i in bucket.leaves], bucket, axis)
        for i, leaf in zip(bucket.leaves, averaged, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def _pmean_leaves(leaves: list[jax.Array], bucket: Bucket, axis: str) -> list[jax.Array]:
    del bucket
    return list(lax.pmean(leaves, axis))


def _pmean_flat(leaves: list[jax.Array], bucket: Bucket, axis: str) -> list[jax.Array]:
    averaged = lax.pmean(jnp.concatenate([leaf.ravel() for leaf in leaves]), axis)
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + leaf.size)
    parts = (averaged[start:end] for start, end in itertools.pairwise(ends))
    return [part.reshape(shape) for part, shape in zip(parts, bucket.shapes, strict=True)]


def compiler_options(layout: Layout, platform: str, *, bucket_mb: float) -> dict[str, Any]:
    """Returns what tells XLA to leave the buckets as they are, for `jax.jit`.

    On GPUs the combiner merges all-reduces up to 30 MiB: its threshold becomes 0 for flat buckets
    and the bucket size for single leaves. On CPUs one pass merges all of them: it is switched off
    for flat buckets, and left to fuse single leaves. A threshold that the user has set in
    `XLA_FLAGS` stands.
    """
    if platform == "cpu" and layout == "flat":
        return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
    threshold = "xla_gpu_all_reduce_combine_threshold_bytes"
    if platform in ("gpu", "cuda", "rocm") and threshold not in os.environ.get("XLA_FLAGS", ""):
        return {threshold: 0 if layout == "flat" else int(bucket_mb * MEBIBYTE)}
    return {}
