"""One replica's gradients: its rows run forward and backward, and the sums averaged over replicas.

Each replica runs the loss on its share of the batch and sums it over the valid entries; gradients
of those sums are averaged over the replicas, bucket by bucket: after the backward pass, or inside
it. The rows may be taken in parts, one after the other, with one reduction for all.

This room knows models, losses and masks, and nothing of optimizers or meshes.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jddp.errors import ConfigError
from jddp.loss_scale import DYNAMIC
from jddp.mesh import AXIS
from jddp.metrics import Sums, mean_tree, sum_in_order, sum_over_replicas
from jddp.pairs import sum_in_pairs
from jddp.recipe import Inputs, Recipe
from jddp.reduce import (
    Backward,
    BucketPlan,
    GradBucket,
    Reduction,
    power_of_two_within,
    trace_backward,
)
from jddp.state import TrainState, float_kinds

PyTree = Any


def mean_gradients(
    recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs
) -> tuple[PyTree, PyTree, Sums, PyTree, Array]:
    """Gradients of the mean loss over the valid entries of the global batch.

    Args:
      recipe: What the step is made of.
      plan: The buckets.
      state: Of one replica.
      inputs: Its rows, and constants.

    Returns:
      The gradients, what the hook remembers now, sums over all replicas, this replica's new
      `model_state`, and how many valid entries it has.
    """
    reduce, add = _reduce_at_end, sum_over_replicas
    if recipe.reduction.placement == "ready":
        reduce = _reduce_when_ready
    if recipe.num_shards is not None:
        reduce, add = _reduce_shards, sum_in_order
    grads, memory, sums, model_state = reduce(recipe, plan, state, inputs)
    # Gradients of sums have been averaged; divided by the mean count they are the global mean.
    own = sums["loss"].count
    sums = add(sums, axis=AXIS)
    count = sums["loss"].count / (recipe.num_shards or lax.axis_size(AXIS))
    if recipe.local_steps is not None:
        count = recipe.local_steps.divisor(state, own, count)
    start = _start(recipe, state.params, sums) * _loss_scale(recipe, state)
    grads = mean_tree(grads, count * start)
    return grads, memory, sums, model_state, own


def trace_gradients(recipe: Recipe, state: TrainState, inputs: Inputs) -> tuple[Backward, Sums]:
    """The backward pass over a replica's rows of one part, traced and not run; and its sums."""
    part = inputs.rows, state.key, inputs.constants
    pullback, sums, _ = _linearize(recipe, state.params, state.model_state, *part)
    return trace_backward(pullback), sums


def refuse_meetings(recipe: Recipe, state: TrainState, inputs: Inputs) -> None:
    """Refuses a model or loss in which replicas meet: logical shards cannot.

    Raises:
      ConfigError: Which names the operation.
    """
    arguments = (state.params, state.model_state, inputs.rows, state.key, inputs.constants)
    text = str(jax.make_jaxpr(recipe.forward)(*arguments))
    if found := re.search(rf"(\w+)\[[^\]]*\b(?:axes|axis_name)=\(?'?{AXIS}\b", text):
        raise ConfigError(
            f"num_shards={recipe.num_shards} runs shards one after the other, and in this model or "
            f"loss they meet, by {found[1]!r} over axis {AXIS!r}. If it is a batch norm, choose "
            "batch_norm='local': each shard its own statistics. Else leave out what meets."
        )


def _parts(
    recipe: Recipe, state: TrainState, inputs: Inputs, replica: Array
) -> tuple[PyTree, Array, PyTree]:
    """A replica's rows in `accumulate_steps` parts, stacked, a key for each, and constants."""
    num_parts = recipe.accumulate_steps
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), replica)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_parts))
    parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), inputs.rows)
    return parts, keys if num_parts > 1 else key[None], inputs.constants


def _reduce_at_end(recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs) -> Any:
    """Averages the gradients of all parts after the last; also returns sums and the new state."""
    parts = _parts(recipe, state, inputs, lax.axis_index(AXIS))
    grads, sums, model_state = _sum_all_parts(recipe, state, parts)
    reduction, scale = _reduction(recipe, state, sums), _scale(recipe, state.params, sums)
    average: Callable[..., Any] = functools.partial(reduction.at_end, plan=plan, scale=scale)
    if recipe.local_steps is not None:
        average = recipe.local_steps.while_shared(average, state)
    grads, memory = average(grads, state.comm_state.hook)
    return grads, memory, sums, model_state


def _reduce_shards(recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs) -> Any:
    """The same of logical shards, one after the other, added up in one order.

    Sums are rows, one for each shard here, and so is what each keeps of its own in `model_state`.
    What a shard computes stands between barriers, and so does the mean of all: what the compiler
    fuses with it would depend on how many a device carries.
    """
    assert recipe.num_shards is not None
    num = recipe.num_shards // lax.axis_size(AXIS)
    first = lax.axis_index(AXIS) * num
    rows = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), inputs.rows)
    kinds = float_kinds(state.model_state, recipe.model.keeps_own)

    def one(i: Array) -> Any:
        own = jax.tree.map(lambda x, k: x[i] if k.is_per_replica else x, state.model_state, kinds)
        given = (jax.tree.map(lambda x: x[i], rows), state.replace(model_state=own))
        its_rows, shard = lax.optimization_barrier(given)
        parts = _parts(recipe, shard, inputs._replace(rows=its_rows), first + i)
        grads, *kept = _sum_all_parts(recipe, shard, parts)
        return lax.optimization_barrier((grads, kept))

    grads, (sums, own) = sum_in_pairs(one, num)
    grads, memory = recipe.reduction.at_end(grads, state.comm_state.hook, plan=plan)
    model_state = jax.tree.map(lambda x, k: x if k.is_per_replica else x[0], own, kinds)
    return lax.optimization_barrier((grads, memory, sums, model_state))


def _reduce_when_ready(recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs) -> Any:
    """The same, but each bucket is averaged inside the backward pass of the last part."""
    parts = _parts(recipe, state, inputs, lax.axis_index(AXIS))
    so_far, model_state, num_parts = None, state.model_state, recipe.accumulate_steps
    if num_parts > 1:
        so_far = _sum_parts(recipe, state, parts, num_parts - 1)
        model_state = so_far[-1]
    pullback, sums, model_state = _linearize(
        recipe, state.params, model_state, *_part(parts, num_parts - 1)
    )
    scale = _loss_scale(recipe, state)
    reduction = _reduction(recipe, state, sums)
    has_own = recipe.model.batch_norm != "sync" and jax.tree.leaves(state.model_state)
    if has_own and _cleans_buckets(recipe):
        reduction = _clean(reduction, sums["loss"].count == 0)
    grads, memory = reduction.when_ready(
        trace_backward(lambda one: pullback(one * scale)),
        state.comm_state.hook,
        plan=plan,
        scale=_scale(recipe, state.params, sums),
        so_far=so_far and so_far[0],
    )
    sums = jax.tree.map(jnp.add, so_far[1], sums) if so_far else sums
    return grads, memory, sums, model_state


def _part(parts: PyTree, i: Any) -> PyTree:
    *split, constants = parts
    return *jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), split), constants


def _sum_all_parts(recipe: Recipe, state: TrainState, parts: PyTree) -> tuple[PyTree, Sums, PyTree]:
    """Gradients, in the dtypes of the parameters, sums and new state, of a replica's rows."""
    grads, sums, model_state = _sum_parts(recipe, state, parts, recipe.accumulate_steps)
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, state.params)
    return grads, sums, model_state


def _sum_parts(
    recipe: Recipe, state: TrainState, parts: PyTree, num_parts: int
) -> tuple[PyTree, Sums, PyTree]:
    """Sums gradients, losses and counts over the first parts, taken in order.

    Half-precision gradients are summed, and returned, in float32.
    """

    def one_part(model_state: PyTree, i: Any) -> tuple[PyTree, Sums, PyTree]:
        pullback, sums, model_state = _linearize(
            recipe, state.params, model_state, *_part(parts, i)
        )
        return pullback(jnp.float32(_loss_scale(recipe, state))), sums, model_state

    def add_part(carry: tuple[PyTree, PyTree], i: Array) -> Any:
        grads, model_state = carry
        more, sums, model_state = one_part(model_state, i)
        grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, more)
        return (grads, model_state), sums

    if num_parts == 1:
        return one_part(state.model_state, 0)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), state.params
    )
    carry = (zeros, state.model_state)
    (grads, model_state), sums = lax.scan(add_part, carry, jnp.arange(num_parts))
    return grads, jax.tree.map(lambda x: x.sum(0), sums), model_state


def _linearize(
    recipe: Recipe, params: PyTree, model_state: PyTree, part: PyTree, key: Array, constants: PyTree
) -> tuple[Callable[[Array], PyTree], Sums, PyTree]:
    """Runs the forward pass on some rows; returns what runs it backward, sums, the new state."""

    def forward(params: PyTree) -> Any:
        return recipe.forward(params, model_state, part, key, constants)

    before = model_state
    _, pullback, (sums, model_state) = jax.vjp(forward, params, has_aux=True)
    start = _start(recipe, params, sums)

    def backward(cotangent: Array) -> PyTree:
        return pullback(cotangent * start)[0]

    if recipe.model.batch_norm == "sync" or not jax.tree.leaves(before):
        return backward, sums, model_state
    without, sums, model_state = _without_empty(recipe, backward, sums, before, model_state)
    # Where buckets leave inside the backward pass they are cleaned one by one, or all would wait.
    return backward if _cleans_buckets(recipe) else without, sums, model_state


def _cleans_buckets(recipe: Recipe) -> bool:
    return recipe.reduction.placement == "ready" and recipe.accumulate_steps == 1


def _clean(reduction: Reduction, is_empty: Array) -> Reduction:
    """Sends zeros from a replica that has no valid row."""
    hook = reduction.hook

    def reduce(bucket: GradBucket, memory: PyTree, axis: str) -> tuple[GradBucket, PyTree]:
        return hook.reduce(jax.tree.map(lambda x: jnp.where(is_empty, 0, x), bucket), memory, axis)

    return dataclasses.replace(reduction, hook=hook._replace(reduce=reduce))


def _without_empty(
    recipe: Recipe, backward: Callable[[Array], PyTree], sums: Sums, before: PyTree, after: PyTree
) -> tuple[Callable[[Array], PyTree], Sums, PyTree]:
    """Keeps out what batch norm makes of a replica's rows where none of them is valid: NaN."""
    is_empty = sums["loss"].count == 0

    def keep(path: Any, old: Array, new: Array) -> Array:
        is_own = recipe.model.keeps_own(path) and jnp.issubdtype(new.dtype, jnp.inexact)
        return jnp.where(is_empty, old, new) if is_own else new

    def without(cotangent: Array) -> PyTree:
        return jax.tree.map(lambda g: jnp.where(is_empty, 0, g), backward(cotangent))

    return without, sums, jax.tree_util.tree_map_with_path(keep, before, after)


def _start(recipe: Recipe, params: PyTree, sums: Sums) -> float:
    """What the backward pass starts from: 1; where numbers are float16, a power of two.

    A gradient summed over all entries of a replica overflows float16. Times this, it is no more
    than the gradient of their mean, and that is what a loss scale scales.
    """
    if recipe.loss_scale is None and not _is_half(params):
        return 1.0
    return power_of_two_within(1 / _count_entries(recipe, sums))


def _loss_scale(recipe: Recipe, state: TrainState) -> Any:
    """What the loss is multiplied by beside that, on every replica alike."""
    if recipe.loss_scale == DYNAMIC:
        return state.comm_state.loss_scale.scale
    return recipe.loss_scale or 1.0


def _is_half(params: PyTree) -> bool:
    return any(x.dtype == jnp.float16 for x in jax.tree.leaves(params))


def _reduction(recipe: Recipe, state: TrainState, sums: Sums) -> Reduction:
    """The reduction; a hook of one's own is handed what it would be without a loss scale.

    What it remembers, such as what it has not sent yet, would else be of the scale of another step.
    """
    reduction = recipe.reduction
    if recipe.loss_scale is None or not reduction.hook_name:
        return reduction
    start = 1.0 if _is_half(state.params) else _start(recipe, state.params, sums)
    scale, hook = jnp.float32(start * _loss_scale(recipe, state)), reduction.hook

    def reduce(bucket: GradBucket, memory: PyTree, axis: str) -> tuple[GradBucket, PyTree]:
        plain = dataclasses.replace(mean_tree(bucket, scale), scale=bucket.scale * start)
        got, memory = hook.reduce(plain, memory, axis)
        return dataclasses.replace(mean_tree(got, 1 / scale), scale=bucket.scale), memory

    return dataclasses.replace(reduction, hook=hook._replace(reduce=reduce))


def _scale(recipe: Recipe, params: PyTree, sums: Sums) -> float:
    return 1 / (_count_entries(recipe, sums) * _start(recipe, params, sums))


def _count_entries(recipe: Recipe, sums: Sums) -> int:
    return sums["loss"].num_entries * recipe.accumulate_steps
