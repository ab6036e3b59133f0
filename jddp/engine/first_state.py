"""The first state, made on every device from one seed, and the same on all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array

from jddp.engine.mesh import (
    AXIS_HERE,
    over_replicas,
    platform,
    put,
    replicate,
    sharding_of,
    shardings,
)
from jddp.engine.spec import Step
from jddp.engine.state import CommState, Inputs, Layout, Replicated, TrainState, Values
from jddp.ground.typing import Leaf, ModelState, Params, PyTree
from jddp.modules.base import freeze, thaw
from jddp.modules.functional import name_constants, name_key
from jddp.reduce.reducer import unless_set
from jddp.reduce.shards import Division


def make_init(step: Step, mesh: Mesh) -> Wrapped:
    """Returns `init(seed, inputs, params, model_state)`, run on every device of the mesh.

    It takes the seed of the base key; example rows, or None where the model has its values, with
    constants; and given parameters and other state, each None to make it.
    """

    def replica(seed: Array, inputs: Inputs, params: Params, model_state: ModelState) -> TrainState:
        # Made on every device instead of on one and sent: equal programs and seeds give equal bits,
        # where PyTorch DDP broadcasts the parameters of rank 0.
        key = jax.random.key(seed)
        if params is None or (model_state is None and inputs.rows is not None):
            loss_fn = name_constants(step.backward.loss_fn, inputs.constants)
            loss_fn = name_key(loss_fn, key)
            made, made_state = step.model.init(loss_fn, key, inputs.rows)
            params = made if params is None else params
            model_state = made_state if model_state is None else model_state
        params, model_state = freeze(params, model_state or {}, step.model.frozen)
        state = TrainState(
            step=jnp.int32(0),
            params=params,
            ema_params=None,
            model_state=model_state,
            opt_state=(),
            comm_state=CommState(outer=step.sync.init(params)),  # a hook's needs the buckets
            skipped=jnp.int32(0),
            key=key,
        )
        # Given values are kept, and an average begins with them: each leaf needs its own buffer.
        return jax.tree.map(jnp.copy, state)

    def init(seed: Array, inputs: Inputs, params: Params, model_state: ModelState) -> TrainState:
        parts = shardings(given_layouts(step, params), mesh)
        trained = P() if params is None else freeze(parts, {}, step.model.frozen)[0]
        leave = TrainState(P(), trained, P(), P(), P(), CommState(P(), P(), P()), P(), P())
        enter = P(), P(), parts, P()
        state = over_replicas(replica, mesh, enter, leave)(seed, inputs, params, model_state)
        step.optimizer.check(state.params)
        layout = shardings(step.optimizer.layouts(state.params), mesh)
        divided = jax.tree.map(lambda x: step.placement.layout(x.shape), state.params)
        placed = shardings(divided, mesh)
        # Mapped by itself, since a sharded optimizer's state leaves with another spec, which needs
        # the shapes of the parameters.
        shapes = jax.eval_shape(lambda x: x, state.params)
        if params is None and step.placement.division is not None:
            own = functools.partial(own_parts, step.placement.division, platform(mesh) == "cpu")
            state = state.replace(params=over_replicas(own, mesh, (P(),), placed)(state.params))
        state = step.average.init(state)
        made = functools.partial(step.optimizer.init, shapes=shapes)
        optimizer = over_replicas(made, mesh, (placed,), layout)
        return state.replace(opt_state=optimizer(state.params))

    # Where it keeps many threads busy, XLA:CPU begins all parameters before it divides the first,
    # and needs four times the memory of all.
    one_by_one = unless_set({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})
    return step.replicas.jit(init, one_by_one if platform(mesh) == "cpu" else None)


def own_parts(division: Division, is_on_cpu: bool, params: Params) -> Params:
    """A replica's parts of parameters that a model has made.

    They are whole for a moment, one after another, and divided on each device: nothing is sent.
    """

    def own(x: jax.Array) -> jax.Array:
        if not is_on_cpu:
            return division.own(x)
        # XLA:CPU would fuse the slice with what makes the values, and round these in another way
        # than where they stay whole. It cannot know that this branch is always taken.
        is_replica = lax.axis_index(AXIS_HERE.get()) >= 0
        return lax.cond(is_replica, division.own, lambda x: jnp.zeros_like(division.own(x)), x)

    return jax.tree.map(own, params)


def given_layouts(step: Step, params: Params) -> PyTree:
    """Layouts of given parameters; those that are not trained are whole."""
    if params is None:
        return None
    layouts = jax.tree.map(lambda x: step.placement.layout(np.shape(x)), params)
    trained, rest = freeze(layouts, {}, step.model.frozen)
    return thaw(trained, jax.tree.map(lambda _: Replicated(), rest))[0]


def put_given(step: Step, mesh: Mesh, values: Values) -> Values:
    """Puts given values on the mesh, array by array: no device has the whole of a divided one."""
    params, model_state = values
    layouts = given_layouts(step, params)

    def place(x: Leaf, layout: Layout) -> jax.Array:
        return put(x, sharding_of(layout, mesh))

    return jax.tree.map(place, params, layouts), replicate(model_state, mesh)
