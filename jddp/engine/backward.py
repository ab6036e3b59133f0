"""One replica's gradients: its rows run forward and backward, and the sums averaged over replicas.

Each replica runs the loss on its share of the batch and sums it over the valid entries; gradients
of those sums are averaged over the replicas, bucket by bucket: after the backward pass, or inside
it. The rows may be taken in parts, one after the other, with one reduction for all.

This room knows models, losses and masks, and nothing of optimizers or meshes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jddp.engine.overwritten import largest_of_replicas, largest_of_rows, put, select
from jddp.engine.spec import Inputs, Recipe
from jddp.engine.state import TrainState, is_float, own_layouts
from jddp.errors import ConfigError
from jddp.jaxprs import axes_of, equations
from jddp.modules.batch_norm import Path, combine
from jddp.modules.forward import trace_state
from jddp.modules.functional import FlaxModel
from jddp.modules.metrics import Sums, mean_tree, sum_in_order, sum_over_replicas
from jddp.reduce import BucketPlan, GradBucket, Reduction, power_of_two_within
from jddp.reduce.backward import Backward, trace_backward
from jddp.reduce.gradients import Finished, Running
from jddp.reduce.pairwise import sum_in_pairs
from jddp.typing import Batch, Grads, HookState, ModelState, Params, PyTree

Summed = tuple[Grads, Sums, ModelState]


def mean_gradients(
    recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs
) -> tuple[Grads, HookState, Sums, ModelState, Array]:
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
    model_state = largest_of_replicas(recipe.model, model_state, recipe.axis)
    # Gradients of sums have been averaged; divided by the mean count they are the global mean.
    own = sums["loss"].count
    sums = add(sums, axis=recipe.axis)
    count = sums["loss"].count / (recipe.num_shards or lax.axis_size(recipe.axis))
    if recipe.local_steps is not None:
        count = recipe.local_steps.divisor(state, own, count)
    start = _start(recipe, state.params, sums) * recipe.guard.scale(state)
    grads = mean_tree(grads, count * start)
    return grads, memory, sums, model_state, own


def trace_gradients(recipe: Recipe, state: TrainState, inputs: Inputs) -> tuple[Backward, Sums]:
    """The backward pass over a replica's rows of one part, traced and not run; and its sums."""
    part = inputs.rows, state.key, inputs.constants
    run = _linearize(recipe, state.params, state.model_state, *part)
    return trace_backward(lambda one: run.backward(one)[0]), run.sums


def refuse_meetings(recipe: Recipe, state: TrainState, inputs: Inputs) -> None:
    """Refuses a model or loss in which replicas meet: logical shards cannot.

    Raises:
      ConfigError: Which names the operation.
    """
    arguments = (state.params, state.model_state, inputs.rows, state.key, inputs.constants)
    found = equations(jax.make_jaxpr(recipe.forward)(*arguments).jaxpr)
    if names := [eqn.primitive.name for eqn in found if recipe.axis in axes_of(eqn)]:
        raise ConfigError(
            f"logical_replicas={recipe.num_shards} run one after the other, and in this model or "
            f"loss they meet, by {names[0]!r} over axis {recipe.axis!r}. If it is a batch norm, "
            "choose batch_norm='local': each its own statistics. Else leave out what meets."
        )


def _parts(
    recipe: Recipe, state: TrainState, inputs: Inputs, replica: Array
) -> tuple[Batch, Array, PyTree]:
    """A replica's rows in `accumulate_steps` parts, stacked, a key for each, and constants."""
    num_parts = recipe.accumulate_steps
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), replica)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_parts))
    parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), inputs.rows)
    return parts, keys if num_parts > 1 else key[None], inputs.constants


def _reduce_at_end(recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs) -> Any:
    """Averages the gradients of all parts after the last; also returns sums and the new state."""
    parts = _parts(recipe, state, inputs, lax.axis_index(recipe.axis))
    grads, sums, model_state = _sum_all_parts(recipe, state, parts)
    reduction, scale = _reduction(recipe, state, sums), _scale(recipe, state.params, sums)
    average: Callable[..., Any] = functools.partial(reduction, plan=plan, scale=scale)
    if recipe.local_steps is not None:
        average = recipe.local_steps.while_shared(average, state)
    grads, memory = average(Finished(grads), state.comm_state.hook)
    return grads, memory, sums, model_state


def _reduce_shards(recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs) -> Any:
    """The same of logical shards, one after the other, added up in one order.

    Sums are rows, one for each shard here, and so is what each keeps of its own in `model_state`.
    What a shard computes stands between barriers, and so does the mean of all: what the compiler
    fuses with it would depend on how many a device carries.
    """
    assert recipe.num_shards is not None
    num = recipe.num_shards // lax.axis_size(recipe.axis)
    first = lax.axis_index(recipe.axis) * num
    rows = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), inputs.rows)
    layouts = own_layouts(state.model_state, recipe.model.keeps_own)

    def one(i: Array) -> Any:
        own = jax.tree.map(lambda x, k: x[i] if k.is_per_replica else x, state.model_state, layouts)
        given = (jax.tree.map(lambda x: x[i], rows), state.replace(model_state=own))
        its_rows, shard = lax.optimization_barrier(given)
        parts = _parts(recipe, shard, inputs._replace(rows=its_rows), first + i)
        given = (shard.params, shard.model_state, *_part(parts, 0))
        labels.append(trace_state(recipe.model, recipe.forward, *given)[1])
        grads, *kept = _sum_all_parts(recipe, shard, parts)
        return lax.optimization_barrier((grads, kept))

    labels: list[PyTree] = []
    grads, (sums, own) = sum_in_pairs(one, num)
    own = largest_of_rows(recipe.model, own)
    grads, memory = recipe.reduction(Finished(grads), state.comm_state.hook, plan=plan)
    model_state = _agree(recipe.model, state.model_state, own, labels[0])
    return lax.optimization_barrier((grads, memory, sums, model_state))


def _agree(model: FlaxModel, old: ModelState, rows: ModelState, labels: PyTree) -> ModelState:
    """What shards agree on of the state that those of this device have left, in rows."""

    def agree(path: Path, before: Array, rows: Array, label: int) -> Array:
        if model.keeps_own(path, rows):
            return rows
        rule = model.sync.rule(model.kinds_at(path))
        return combine(path, rule, before, rows, model.sync) if rule and label else rows[0]

    return jax.tree_util.tree_map_with_path(agree, old, rows, labels)


def _reduce_when_ready(recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs) -> Any:
    """The same, but each bucket is averaged inside the backward pass of the last part."""
    parts = _parts(recipe, state, inputs, lax.axis_index(recipe.axis))
    so_far, model_state, num_parts = None, state.model_state, recipe.accumulate_steps
    if num_parts > 1:
        so_far = _sum_parts(recipe, state, parts, num_parts - 1)
        model_state = put(so_far[-1], select(recipe.model, state.model_state))
    run = _linearize(recipe, state.params, model_state, *_part(parts, num_parts - 1))
    sums, scale = run.sums, recipe.guard.scale(state)
    earlier = jax.tree.leaves(so_far and so_far[0])

    def finish(leaf: int, grad: Array) -> Array:
        grad = run.finish(grad)
        if not earlier:
            return grad
        return (grad.astype(earlier[leaf].dtype) + earlier[leaf]).astype(grad.dtype)

    backward = trace_backward(lambda one: run.backward(one * scale))
    running = Running(backward, finish, num=len(jax.tree.leaves(state.params)))
    (grads, found), memory = _reduction(recipe, state, sums)(
        running, state.comm_state.hook, plan=plan, scale=_scale(recipe, state.params, sums)
    )
    if so_far:
        sums = jax.tree.map(jnp.add, so_far[1], sums)
        found = jax.tree.map(jnp.maximum, select(recipe.model, so_far[-1]), found)
    return grads, memory, sums, put(run.model_state, found)


def _part(parts: PyTree, i: Any) -> PyTree:
    *split, constants = parts
    return *jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), split), constants


def _sum_all_parts(recipe: Recipe, state: TrainState, parts: PyTree) -> Summed:
    """Gradients, in the dtypes of the parameters, sums and new state, of a replica's rows."""
    grads, sums, model_state = _sum_parts(recipe, state, parts, recipe.accumulate_steps)
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, state.params)
    return grads, sums, model_state


def _sum_parts(recipe: Recipe, state: TrainState, parts: PyTree, num_parts: int) -> Summed:
    """Sums gradients, losses and counts over the first parts, taken in order.

    Half-precision gradients are summed, and returned, in float32.
    """

    def one_part(model_state: ModelState, i: Any) -> tuple[tuple[Grads, PyTree], Sums, ModelState]:
        run = _linearize(recipe, state.params, model_state, *_part(parts, i))
        grads, found = run.backward(jnp.float32(recipe.guard.scale(state)))
        return (jax.tree.map(run.finish, grads), found), run.sums, run.model_state

    def add_part(carry: tuple[Grads, PyTree, ModelState], i: Array) -> Any:
        grads, found, model_state = carry
        (more, last), sums, model_state = one_part(model_state, i)
        grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, more)
        return (grads, jax.tree.map(jnp.maximum, found, last), model_state), sums

    if num_parts == 1:
        (grads, found), sums, model_state = one_part(state.model_state, 0)
        return grads, sums, put(model_state, found)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), state.params
    )
    least = jax.tree.map(jnp.zeros_like, select(recipe.model, state.model_state))
    carry = (zeros, least, state.model_state)
    (grads, found, model_state), sums = lax.scan(add_part, carry, jnp.arange(num_parts))
    return grads, jax.tree.map(lambda x: x.sum(0), sums), put(model_state, found)


class _Linearized(NamedTuple):
    """A micro-batch that has run forward, and how to run it backward.

    Attributes:
      backward: From the cotangent of the loss to gradients, and what `overwritten` selects of the
        new state.
      finish: Applied to each gradient where it is taken from the backward pass.
      sums: Of the loss and metrics.
      model_state: The new one.
    """

    backward: Callable[[Array], PyTree]
    finish: Callable[[Array], Array]
    sums: Sums
    model_state: ModelState


def _linearize(
    recipe: Recipe, params: Params, before: ModelState, part: Batch, key: Array, constants: PyTree
) -> _Linearized:
    def forward(params: Params, found: PyTree) -> Any:
        return recipe.forward(params, put(before, found), part, key, constants)

    given = params, select(recipe.model, before)
    _, pullback, (sums, model_state) = jax.vjp(forward, *given, has_aux=True)
    start = _start(recipe, params, sums)
    finish, model_state = _without_empty(recipe.model, sums["loss"].count, before, model_state)
    return _Linearized(lambda cotangent: pullback(cotangent * start), finish, sums, model_state)


def _without_empty(
    model: FlaxModel, count: Array, before: ModelState, after: ModelState
) -> tuple[Callable[[Array], Array], ModelState]:
    """Keeps out the NaN that batch norm makes of an empty micro-batch, one without a valid row.

    The guard takes one gradient at a time, so that a bucket need not wait for all of them. Under
    "sync" statistics are those of all replicas' rows, and there is nothing to keep out.

    Args:
      model: The model.
      count: Number of valid entries of the micro-batch.
      before: The model's other state at its start.
      after: The same at its end.

    Returns:
      A guard to apply to each gradient, and the state to go on with.
    """
    if model.batch_norm == "sync" or not jax.tree.leaves(before):
        return lambda grad: grad, after
    is_empty = count == 0

    def keep(path: Path, old: Array, new: Array) -> Array:
        is_own = model.keeps_own(path, new) and is_float(new)
        return jnp.where(is_empty, old, new) if is_own else new

    state = jax.tree_util.tree_map_with_path(keep, before, after)
    return lambda grad: jnp.where(is_empty, 0, grad), state


def _start(recipe: Recipe, params: Params, sums: Sums) -> float:
    """What the backward pass starts from: 1; where numbers are float16, a power of two.

    A gradient summed over all entries of a replica overflows float16. Times this, it is no more
    than the gradient of their mean, and that is what a loss scale scales.
    """
    if recipe.loss_scale is None and not _is_half(params):
        return 1.0
    return power_of_two_within(1 / _count_entries(recipe, sums))


def _is_half(params: Params) -> bool:
    return any(x.dtype == jnp.float16 for x in jax.tree.leaves(params))


def _reduction(recipe: Recipe, state: TrainState, sums: Sums) -> Reduction:
    """The reduction; a hook of one's own is handed what it would be without a loss scale.

    What it remembers, such as what it has not sent yet, would else be of the scale of another step.
    """
    reduction = recipe.reduction
    if recipe.loss_scale is None or not reduction.hook_name:
        return reduction
    start = 1.0 if _is_half(state.params) else _start(recipe, state.params, sums)
    scale, hook = jnp.float32(start * recipe.guard.scale(state)), reduction.hook

    def reduce(bucket: GradBucket, memory: HookState, axis: str) -> tuple[GradBucket, HookState]:
        plain = dataclasses.replace(mean_tree(bucket, scale), scale=bucket.scale * start)
        got, memory = hook.reduce(plain, memory, axis)
        return dataclasses.replace(mean_tree(got, 1 / scale), scale=bucket.scale), memory

    return dataclasses.replace(reduction, hook=hook._replace(reduce=reduce))


def _scale(recipe: Recipe, params: Params, sums: Sums) -> float:
    return 1 / (_count_entries(recipe, sums) * _start(recipe, params, sums))


def _count_entries(recipe: Recipe, sums: Sums) -> int:
    return sums["loss"].num_entries * recipe.accumulate_steps
