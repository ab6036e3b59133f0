"""The first state, made on every device from one seed, and the same on all."""

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array

from jddp.engine.mesh import over_replicas
from jddp.engine.spec import Step
from jddp.engine.state import CommState, Inputs, TrainState, specs
from jddp.modules.frozen import freeze
from jddp.modules.functional import name_constants, name_key
from jddp.typing import ModelState, Params, PyTree


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
            ema_params=step.average.init(params),
            model_state=model_state,
            opt_state=(),
            comm_state=CommState(outer=step.sync.init(params)),  # a hook's needs the buckets
            skipped=jnp.int32(0),
            key=key,
        )
        # Given values are kept, and an average begins with them: each leaf needs its own buffer.
        return jax.tree.map(jnp.copy, state)

    def init(*given: PyTree) -> TrainState:
        state = over_replicas(replica, mesh, P(), P())(*given)
        step.optimizer.check(state.params, mesh.size)
        layout = specs(step.optimizer.layouts(state.params), step.axis)
        placed = specs(
            jax.tree.map(lambda x: step.placement.layout(x.shape), state.params), step.axis
        )
        # Whole on each device for a moment, leaf by leaf, and divided there: nothing is sent.
        params, ema_params = step.placement.place((state.params, state.ema_params), mesh)
        state = state.replace(params=params, ema_params=ema_params)
        # Mapped by itself, since a sharded optimizer's state leaves with another spec, which needs
        # the shapes of the parameters.
        optimizer = over_replicas(step.optimizer.init, mesh, (placed,), layout)
        return state.replace(opt_state=optimizer(state.params))

    return step.replicas.jit(init)
