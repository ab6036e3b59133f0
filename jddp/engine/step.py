"""Data-parallel SGD, as its definition reads: one replica's step, mapped over the mesh.

    forward ─► backward ─► reduce (bucketed mean) ─► optimizer update

Gradients of sums over a replica's valid entries are averaged over the replicas, bucket by bucket
(`gradients`), and divided by the mean count. That is the mean over the global batch, however valid
entries are spread. Nothing else travels but one small vector of sums and counts, and what synced
batch norm needs.

`shard_map` stands in this module alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import P, lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jddp.engine.backward import mean_gradients, refuse_meetings, trace_gradients
from jddp.engine.mesh import axis_of, mapped_over
from jddp.engine.optimizer import check_optimizer, init_optimizer, optimizer_layouts, update
from jddp.engine.same_program import SameProgram
from jddp.engine.spec import Inputs, Recipe
from jddp.engine.state import CommState, TrainState, enter, leave, specs
from jddp.errors import ConfigError
from jddp.jaxprs import uses_rng
from jddp.modules.forward import mask_of, run_forward
from jddp.modules.functional import name_constants
from jddp.modules.metrics import Sum, Sums, count_rows, mean, sum_in_order, sum_over_replicas
from jddp.reduce import BucketPlan
from jddp.typing import Batch, Grads, LossFn, Metrics, ModelState, Params, PyTree


def replica_step(
    recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs
) -> tuple[TrainState, Metrics]:
    """One optimizer step on one replica's share of the batch."""
    grads, memory, sums, model_state, own = mean_gradients(recipe, plan, state, inputs)
    metrics = _means(sums)
    grads, norm = recipe.clip(grads, recipe.view)
    params, opt_state = update(recipe, plan, grads, state, metrics["loss"])
    outer = state.comm_state.outer
    if recipe.local_steps is not None:
        params, opt_state = recipe.local_steps.wait(state, own, params, opt_state)
        params, outer = recipe.local_steps.meet(recipe.reduction, state, params)
    after = state.replace(
        step=state.step + 1,
        params=params,
        ema_params=_move_average(state.ema_params, params, recipe.ema_decay),
        model_state=model_state,
        opt_state=opt_state,
        comm_state=dataclasses.replace(state.comm_state, hook=memory, outer=outer),
    )
    after, verdict = recipe.guard.accept(state, after, (metrics["loss"], grads), recipe.view)
    return after, {**metrics, **norm, **verdict}


def _means(sums: Sums) -> dict[str, Float[Array, ""]]:
    means = {name: mean(x.total, x.count) for name, x in sums.items()}
    return {**means, "count": sums["loss"].count}


def replica_gradients(
    recipe: Recipe, plan: BucketPlan, state: TrainState, inputs: Inputs
) -> tuple[Grads, Metrics]:
    """A step as far as its averaged gradients, and its metrics."""
    grads, _, sums, *_ = mean_gradients(recipe, plan, state, inputs)
    if recipe.reduction.keeps_parts:
        grads = recipe.reduction.gather(grads, state.params, plan=plan)
    return grads, _means(sums)


def _move_average(average: Params, params: Params, decay: float | None) -> Params:
    return None if decay is None else optax.incremental_update(params, average, 1 - decay)


def replica_init(
    recipe: Recipe, seed: Array, inputs: Inputs, params: Params, model_state: ModelState
) -> TrainState:
    """The first state but for the optimizer's, made on every replica alike from one seed.

    Args:
      recipe: What the step is made of.
      seed: Of the base key.
      inputs: Example rows, or None where the model has its values; and constants.
      params: Given parameters, or None to make them.
      model_state: Given other state, or None to make it.
    """
    key = jax.random.key(seed)
    if params is None or (model_state is None and inputs.rows is not None):
        loss_fn = name_constants(recipe.loss_fn, inputs.constants)
        made, made_state = recipe.model.init(loss_fn, key, inputs.rows)
        params = made if params is None else params
        model_state = made_state if model_state is None else model_state
    local = recipe.local_steps
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        ema_params=None if recipe.ema_decay is None else params,
        model_state={} if model_state is None else model_state,
        opt_state=(),  # made by `init_optimizer`
        # What a hook remembers is made once the buckets are known.
        comm_state=CommState(outer=() if local is None else local.init(params)),
        skipped=jnp.int32(0),
        key=key,
    )
    # Given values are kept, and an average begins with them: each leaf needs its own buffer.
    return jax.tree.map(jnp.copy, state)


def replica_evaluate(
    recipe: Recipe,
    key: Array,
    params: Params,
    model_state: ModelState,
    number: Array,
    inputs: Inputs,
    valid: Float[Array, "b"],
) -> Sums:
    """Sums of evaluation batch `number` over all replicas; "examples" counts rows."""

    def one(rows: Batch, valid: Array, key: Array) -> Sums:
        arguments = (params, model_state, rows, key, inputs.constants)
        _, (sums, _) = run_forward(
            recipe.model, recipe.eval_fn, *arguments, train=False, valid=valid
        )
        examples = count_rows(mask_of(rows, valid))
        return {**sums, "examples": Sum(examples, examples)}

    key = jax.random.fold_in(key, number)
    if recipe.num_shards is None:
        key = jax.random.fold_in(key, lax.axis_index(recipe.axis))
        return sum_over_replicas(one(inputs.rows, valid, key), axis=recipe.axis)
    num = recipe.num_shards // lax.axis_size(recipe.axis)
    numbers = lax.axis_index(recipe.axis) * num + jnp.arange(num)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(numbers)
    shards = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), (inputs.rows, valid))

    def between_barriers(given: PyTree) -> Sums:
        sums: Sums = lax.optimization_barrier(one(*lax.optimization_barrier(given)))
        return sums

    return sum_in_order(lax.map(between_barriers, (*shards, keys)), axis=recipe.axis)


def _split(mesh: Mesh) -> Any:
    """How the inputs of a step lie on the mesh."""
    return Inputs(P(axis_of(mesh)), P())


def make_init(recipe: Recipe, mesh: Mesh) -> Callable[..., TrainState]:
    """Returns `init(seed, inputs, params, model_state)`, run on every device of the mesh."""

    def init(*args: Any) -> TrainState:
        state = over_replicas(functools.partial(replica_init, recipe), mesh, P(), P())(*args)
        check_optimizer(recipe, state.params, mesh.size)
        layout = specs(optimizer_layouts(recipe, state.params), recipe.axis)
        optimizer = over_replicas(functools.partial(init_optimizer, recipe), mesh, P(), layout)
        return state.replace(opt_state=optimizer(state.params))

    return _jit(recipe, init)


def trace(
    recipe: Recipe, mesh: Mesh, state: TrainState, inputs: Inputs
) -> tuple[tuple[tuple[int | None, ...], int], Sums, bool]:
    """Traces a replica's forward and backward pass. Computes nothing.

    Args:
      recipe: What the step is made of.
      mesh: Gives the axis its size.
      state: Shapes of one replica's state.
      inputs: Shapes of its rows, of one part, and of constants.

    Returns:
      `Backward.ready` with `Backward.num_looped`; shapes of the sums of loss and metrics; and
      whether one of the passes draws random numbers.
    """
    traced = []

    def replica(state: TrainState, inputs: Inputs) -> Sums:
        if recipe.num_shards is not None:
            refuse_meetings(recipe, state, inputs)
        backward, sums = trace_gradients(recipe, state, inputs)
        traced.append(backward)
        return sums

    program = over_replicas(replica, mesh, P(), P())
    forward, sums = jax.make_jaxpr(program, return_shape=True)(state, inputs)
    (backward,) = traced
    draws = uses_rng(forward.jaxpr) or uses_rng(backward.traced.jaxpr)
    return (backward.ready, backward.num_looped), sums, draws


def make_step(
    recipe: Recipe,
    plan: BucketPlan,
    mesh: Mesh,
    layouts: TrainState,
    *,
    donate: bool,
    options: dict[str, Any],
) -> Callable[[TrainState, Inputs], tuple[TrainState, Metrics]]:
    """Returns `step(state, inputs)` over the mesh: a new state, and metrics that are global."""

    def step(state: TrainState, inputs: Inputs) -> tuple[TrainState, Metrics]:
        if recipe.num_shards is not None:  # of which a replica has several
            return replica_step(recipe, plan, state, inputs)
        state, metrics = replica_step(recipe, plan, enter(state, layouts), inputs)
        return leave(state, layouts), metrics

    layout = specs(layouts, recipe.axis)
    mapped = over_replicas(step, mesh, (layout, _split(mesh)), (layout, P()))
    return _jit(recipe, mapped, options, donate_argnums=(0,) if donate else ())


def make_gradients(
    recipe: Recipe, plan: BucketPlan, mesh: Mesh, layouts: TrainState, *, options: dict[str, Any]
) -> Callable[[TrainState, Inputs], tuple[Grads, Metrics]]:
    """Returns `gradients(state, inputs)` over the mesh: both are global, the state is kept."""

    def gradients(state: TrainState, inputs: Inputs) -> tuple[Grads, Metrics]:
        entered = state if recipe.num_shards is not None else enter(state, layouts)
        return replica_gradients(recipe, plan, entered, inputs)

    if recipe.local_steps is not None:  # steps average nothing, and this is the mean all the same
        recipe = dataclasses.replace(recipe, local_steps=None)
    mapped = over_replicas(gradients, mesh, (specs(layouts, recipe.axis), _split(mesh)), P())
    return _jit(recipe, mapped, options)


def make_evaluate(recipe: Recipe, mesh: Mesh) -> Callable[..., Sums]:
    """Returns `evaluate(key, params, model_state, number, inputs, valid)` over the mesh."""
    in_specs = (P(), P(), P(), P(), _split(mesh), P(axis_of(mesh)))
    replica = functools.partial(replica_evaluate, recipe)
    return _jit(recipe, over_replicas(replica, mesh, in_specs, P()))


def make_predict(recipe: Recipe, mesh: Mesh, function: LossFn) -> Callable[..., PyTree]:
    """Returns `predict`, called as `evaluate` is: what `function` gives for each row."""

    def replica(
        key: Array,
        params: Params,
        model_state: ModelState,
        number: Array,
        inputs: Inputs,
        valid: Array,
    ) -> PyTree:
        key = jax.random.fold_in(jax.random.fold_in(key, number), lax.axis_index(recipe.axis))
        named = name_constants(function, inputs.constants)
        outputs = recipe.model.evaluate(named, params, model_state, inputs.rows, key)
        for x in jax.tree.leaves(outputs):
            if jnp.shape(x)[:1] != valid.shape:
                raise ConfigError(
                    f"predict: the function returned shape {jnp.shape(x)} for {len(valid)} rows. "
                    "Return arrays whose first dim is the rows."
                )
        return outputs

    in_specs = (P(), P(), P(), P(), _split(mesh), P(axis_of(mesh)))
    return jax.jit(over_replicas(replica, mesh, in_specs, P(axis_of(mesh))))


def _jit(
    recipe: Recipe, function: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Jits a function; with `num_shards`, to a program that is simplified alike on any mesh."""
    jit = jax.jit if recipe.num_shards is None else SameProgram
    return jit(function, compiler_options=options, **kwargs)


def over_replicas(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    """Maps a replica's function over the mesh; what leaves through `P()` it has made the same."""
    # Unchecked: the check refuses plain RNNs, scans from zeros, conds with a constant branch, and
    # makes autodiff sum gradients leaf by leaf. That replicas end alike is ours to keep and to
    # test.
    function = mapped_over(axis_of(mesh))(function)
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
