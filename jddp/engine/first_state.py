"""The first state, made on every device from one seed, and the same on all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array

from jddp.engine.mesh import over_replicas, put, replicate, sharding_of, shardings
from jddp.engine.spec import Step
from jddp.engine.state import CommState, Inputs, Layout, Replicated, TrainState, Values
from jddp.modules.frozen import freeze, thaw
from jddp.modules.functional import name_constants, name_key
from jddp.typing import Leaf, ModelState, Params, PyTree


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
        placed = shardings(
            jax.tree.map(lambda x: step.placement.layout(x.shape), state.params), mesh
        )
        # Those that a model makes are whole on each device for a moment, and divided there: nothing
        # is sent. Given ones are divided already.
        params = step.placement.place(state.params, mesh)
        state = step.average.init(state.replace(params=params))
        # Mapped by itself, since a sharded optimizer's state leaves with another spec, which needs
        # the shapes of the parameters.
        shapes = jax.eval_shape(lambda x: x, state.params)
        made = functools.partial(step.optimizer.init, shapes=shapes)
        optimizer = over_replicas(made, mesh, (placed,), layout)
        return state.replace(opt_state=optimizer(state.params))

    return step.replicas.jit(init)


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
