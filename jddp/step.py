"""Data-parallel SGD, as its definition reads: one replica's step, mapped over the mesh.

    forward ─► backward ─► reduce (bucketed mean) ─► optimizer update

Each replica runs the loss on its share of the batch and sums it over the valid entries; gradients
of those sums are averaged over the replicas, bucket by bucket, and divided by the mean count. That
is the mean over the global batch, however valid entries are spread. Nothing else travels but one
small vector of sums and counts, and what synced batch norm needs.

`shard_map` stands in this module alone.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import P, lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jddp.errors import ConfigError
from jddp.mesh import AXIS, count_rows
from jddp.metrics import Sum, Sums, mean, mean_tree, sum_over_replicas, weigh
from jddp.metrics import count_rows as count_valid_rows
from jddp.recipe import Recipe
from jddp.reduce import BucketPlan, power_of_two_within, trace_backward
from jddp.state import TrainState, enter, leave, specs
from jddp.unused import take_back

PyTree = Any
Metrics = dict[str, Float[Array, ""]]


def replica_step(
    recipe: Recipe, plan: BucketPlan, state: TrainState, batch: PyTree
) -> tuple[TrainState, Metrics]:
    """One optimizer step on one replica's share of the batch."""
    reduce = _reduce_when_ready if recipe.reduction.placement == "ready" else _reduce_at_end
    grads, comm_state, sums, model_state = reduce(recipe, plan, state, _parts(recipe, state, batch))
    # Gradients of sums have been averaged; divided by the mean count they are the global mean.
    sums = sum_over_replicas(sums, axis=AXIS)
    count = sums["loss"].count / lax.axis_size(AXIS)
    grads = mean_tree(grads, count * _start(recipe, state.params, sums))
    metrics = {name: mean(x.total, x.count) for name, x in sums.items()}
    metrics["count"] = sums["loss"].count
    if recipe.max_grad_norm is not None:
        metrics["grad_norm"] = optax.tree.norm(grads)
        clip = optax.clip_by_global_norm(recipe.max_grad_norm)
        grads, _ = clip.update(grads, clip.init(grads))
    optimizer = optax.with_extra_args_support(recipe.optimizer)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params, value=metrics["loss"]
    )
    params = optax.apply_updates(state.params, updates)
    if recipe.unused_parameters == "skip" and plan.unused:
        params, opt_state = take_back(
            (params, opt_state), (state.params, state.opt_state), params, plan.unused
        )
    state = TrainState(
        step=state.step + 1,
        params=params,
        ema_params=_move_average(state.ema_params, params, recipe.ema_decay),
        model_state=model_state,
        opt_state=opt_state,
        comm_state=comm_state,
        key=state.key,
    )
    return state, metrics


def _parts(recipe: Recipe, state: TrainState, batch: PyTree) -> tuple[PyTree, Array]:
    """This replica's rows in `accumulate_steps` parts, stacked, and a key for each."""
    num_parts = recipe.accumulate_steps
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), lax.axis_index(AXIS))
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_parts))
    parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)
    return parts, keys if num_parts > 1 else key[None]


def _reduce_at_end(recipe: Recipe, plan: BucketPlan, state: TrainState, parts: PyTree) -> Any:
    """Averages the gradients of all parts after the last; also returns sums and the new state."""
    num_parts = recipe.accumulate_steps
    grads, sums, model_state = _sum_parts(recipe, state, parts, num_parts)
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, state.params)
    grads, comm_state = recipe.reduction.at_end(
        grads, state.comm_state, plan=plan, scale=_scale(recipe, state.params, sums)
    )
    return grads, comm_state, sums, model_state


def _reduce_when_ready(recipe: Recipe, plan: BucketPlan, state: TrainState, parts: PyTree) -> Any:
    """The same, but each bucket is averaged inside the backward pass of the last part."""
    so_far, model_state, num_parts = None, state.model_state, recipe.accumulate_steps
    if num_parts > 1:
        so_far = _sum_parts(recipe, state, parts, num_parts - 1)
        model_state = so_far[-1]
    pullback, sums, model_state = _linearize(
        recipe, state.params, model_state, *_part(parts, num_parts - 1)
    )
    grads, comm_state = recipe.reduction.when_ready(
        trace_backward(pullback),
        state.comm_state,
        plan=plan,
        scale=_scale(recipe, state.params, sums),
        so_far=so_far and so_far[0],
    )
    sums = jax.tree.map(jnp.add, so_far[1], sums) if so_far else sums
    return grads, comm_state, sums, model_state


def _part(parts: PyTree, i: Any) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), parts)


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
        return pullback(jnp.float32(1)), sums, model_state

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
    recipe: Recipe, params: PyTree, model_state: PyTree, part: PyTree, key: Array
) -> tuple[Callable[[Array], PyTree], Sums, PyTree]:
    """Runs the forward pass on some rows; returns what runs it backward, sums, the new state."""

    def forward(params: PyTree) -> Any:
        return _forward(recipe, params, model_state, part, key, train=True)

    _, pullback, (sums, model_state) = jax.vjp(forward, params, has_aux=True)
    start = _start(recipe, params, sums)
    return lambda cotangent: pullback(cotangent * start)[0], sums, model_state


def _start(recipe: Recipe, params: PyTree, sums: Sums) -> float:
    """What the backward pass starts from: 1; where parameters are float16, a power of two.

    A gradient summed over all entries of a replica overflows float16. Times this, it is no more
    than the gradient of their mean.
    """
    if all(x.dtype != jnp.float16 for x in jax.tree.leaves(params)):
        return 1.0
    return power_of_two_within(1 / _count_entries(recipe, sums))


def _scale(recipe: Recipe, params: PyTree, sums: Sums) -> float:
    return 1 / (_count_entries(recipe, sums) * _start(recipe, params, sums))


def _count_entries(recipe: Recipe, sums: Sums) -> int:
    return sums["loss"].num_entries * recipe.accumulate_steps


def _forward(
    recipe: Recipe,
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: Array,
    *,
    train: bool,
    valid: Array | None = None,
) -> tuple[Float[Array, ""], tuple[Sums, PyTree]]:
    """The loss of one replica, summed over its valid entries, with all sums and the new state."""
    arguments = (params, model_state, batch, key)
    if train:
        outputs, model_state = recipe.model.train(recipe.loss_fn, *arguments)
    else:
        outputs = recipe.model.evaluate(recipe.eval_fn, *arguments)
    losses, metrics = _losses_and_metrics(outputs, count_rows(batch))
    # In evaluation batches may differ in size, so a scalar, a mean over its rows, weighs by them.
    sums = weigh(
        losses,
        metrics,
        mask=_mask(batch, valid),
        scalar_count=1.0 if train else float(count_rows(batch)),
    )
    return sums["loss"].total, (sums, model_state)


def _losses_and_metrics(outputs: Any, rows: int) -> tuple[Array, Mapping[str, Array]]:
    losses, metrics = outputs if isinstance(outputs, tuple) else (outputs, {})
    for name, values in {"loss": losses, **metrics}.items():
        shape = jnp.shape(values)
        if shape and shape[0] != rows:
            raise ConfigError(
                f"loss_fn returned {name!r} of shape {shape} for {rows} rows. Return one value per "
                "row (or per token of each row), or a scalar."
            )
    return losses, metrics


def _mask(batch: PyTree, valid: Array | None) -> Any:
    """The user's mask, without the rows that evaluation has padded; None where all counts."""
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    if mask is None or valid is None:
        return valid if mask is None else mask
    return mask.astype(jnp.float32) * jnp.expand_dims(valid, tuple(range(1, mask.ndim)))


def _move_average(average: PyTree, params: PyTree, decay: float | None) -> PyTree:
    return None if decay is None else optax.incremental_update(params, average, 1 - decay)


def replica_init(
    recipe: Recipe, seed: Array, batch: PyTree, params: PyTree, model_state: PyTree
) -> TrainState:
    """The first state, made on every replica alike from one seed.

    Args:
      recipe: What the step is made of.
      seed: Of the base key.
      batch: Example rows, or None where the model has its values.
      params: Given parameters, or None to make them.
      model_state: Given other state, or None to make it.
    """
    key = jax.random.key(seed)
    if params is None or (model_state is None and batch is not None):
        made, made_state = recipe.model.init(recipe.loss_fn, key, batch)
        params = made if params is None else _matching(params, made)
        model_state = made_state if model_state is None else model_state
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        ema_params=None if recipe.ema_decay is None else params,
        model_state={} if model_state is None else model_state,
        opt_state=recipe.optimizer.init(params),
        comm_state=(),  # made once the buckets are known
        key=key,
    )
    # An optimizer may keep the parameters themselves: each leaf needs a buffer of its own.
    return jax.tree.map(jnp.copy, state)


def _matching(given: PyTree, made: PyTree) -> PyTree:
    """Refuses given parameters whose paths or shapes are not those of the model."""

    def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}

    got, want = shapes(given), shapes(made)
    differ = sorted(name for name in {*got, *want} if got.get(name) != want.get(name))
    if differ:
        name = differ[0]
        raise ConfigError(
            f"params= does not fit the model at {len(differ)} places; the first is {name!r}: got "
            f"{got.get(name, 'nothing')}, the model has {want.get(name, 'nothing')}."
        )
    return given


def replica_evaluate(
    recipe: Recipe,
    key: Array,
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    valid: Float[Array, "b"],
) -> Sums:
    """Sums of one evaluation batch over all replicas; "examples" counts rows."""
    key = jax.random.fold_in(key, lax.axis_index(AXIS))
    _, (sums, _) = _forward(recipe, params, model_state, batch, key, train=False, valid=valid)
    rows = count_valid_rows(_mask(batch, valid))
    return sum_over_replicas({**sums, "examples": Sum(rows, rows)}, axis=AXIS)


def make_init(recipe: Recipe, mesh: Mesh) -> Callable[..., TrainState]:
    """Returns `init(seed, batch, params, model_state)`, run on every device of the mesh."""
    return jax.jit(over_replicas(functools.partial(replica_init, recipe), mesh, P(), P()))


def trace_ready(
    recipe: Recipe, mesh: Mesh, state: TrainState, batch: PyTree
) -> tuple[tuple[int | None, ...], int]:
    """`Backward.ready` and `Backward.num_looped` of a replica's step. Computes nothing.

    Args:
      recipe: What the step is made of.
      mesh: Gives the axis its size.
      state: Shapes of one replica's state.
      batch: Shapes of its rows, of one part.
    """
    traced = []

    def replica(state: TrainState, batch: PyTree) -> tuple[()]:
        pullback, _, _ = _linearize(recipe, state.params, state.model_state, batch, state.key)
        backward = trace_backward(pullback)
        traced.append((backward.ready, backward.num_looped))
        return ()

    log = logging.getLogger("jddp")
    level = log.level
    log.setLevel(logging.ERROR)  # The step is traced again, and warns then.
    try:
        jax.eval_shape(over_replicas(replica, mesh, P(), P()), state, batch)
    finally:
        log.setLevel(level)
    return traced[0]


def make_step(
    recipe: Recipe,
    plan: BucketPlan,
    mesh: Mesh,
    kinds: TrainState,
    *,
    donate: bool,
    options: dict[str, Any],
) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
    """Returns `step(state, batch)` over the mesh: a new state, and metrics that are global."""

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        state, metrics = replica_step(recipe, plan, enter(state, kinds), batch)
        return leave(state, kinds), metrics

    layout = specs(kinds, AXIS)
    mapped = over_replicas(step, mesh, (layout, P(AXIS)), (layout, P()))
    return jax.jit(mapped, donate_argnums=(0,) if donate else (), compiler_options=options)


def make_evaluate(recipe: Recipe, mesh: Mesh) -> Callable[..., Sums]:
    """Returns `evaluate(key, params, model_state, batch, valid)` over the mesh."""
    in_specs = (P(), P(), P(), P(AXIS), P(AXIS))
    replica = functools.partial(replica_evaluate, recipe)
    return jax.jit(over_replicas(replica, mesh, in_specs, P()))


def over_replicas(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    """Maps a replica's function over the mesh; what leaves through `P()` it has made the same."""
    # Unchecked: the check refuses plain RNNs, scans from zeros, conds with a constant branch, and
    # makes autodiff sum gradients leaf by leaf. That replicas end alike is ours to keep and to
    # test.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
