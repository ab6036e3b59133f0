"""The step of many replicas on one device, where they are shares side by side (`jax.vmap`).

What N devices have to be equal to where replicas draw random numbers, each its own.
"""

from typing import Any

import jax

from jddp.data_parallel import DataParallel
from jddp.mesh import AXIS
from jddp.recipe import Inputs
from jddp.state import Sharded, TrainState
from jddp.step import replica_gradients, replica_step

PyTree = Any


def side_by_side(
    ddp: DataParallel, state: TrainState, batch: PyTree, constants: PyTree
) -> tuple[PyTree, TrainState, PyTree]:
    """Takes the step of `ddp` for all replicas on its first device.

    Args:
      ddp: Which has taken a step on such rows.
      state: Of `ddp`; it is not changed.
      batch: Rows, which divide over the devices.
      constants: As for its `step`.

    Returns:
      The averaged gradients, the new state, and the metrics.
    """
    assert ddp.plan is not None
    recipe, plan, first = ddp.recipe, ddp.plan, ddp.mesh.devices.flat[0]
    kinds = ddp.kinds(state)
    split = jax.tree.map(lambda kind: isinstance(kind, Sharded), kinds)
    own = jax.tree.map(lambda kind, is_split: kind.is_per_replica or is_split, kinds, split)
    axes = jax.tree.map(lambda is_own: 0 if is_own else None, own)

    def replica(state: TrainState, inputs: Inputs) -> tuple[PyTree, TrainState, PyTree]:
        grads, _ = replica_gradients(recipe, plan, state, inputs)
        return grads, *replica_step(recipe, plan, state, inputs)

    def place(x: Any, is_own: bool, is_split: bool) -> Any:
        x = x.reshape(ddp.mesh.size, -1, *x.shape[1:]) if is_split else x
        return jax.device_put(x if is_own else x.addressable_data(0), first)

    shares = jax.tree.map(lambda x: x.reshape(ddp.mesh.size, -1, *x.shape[1:]), batch)
    inputs = Inputs(*jax.device_put((shares, constants), first))
    mapped = jax.jit(jax.vmap(replica, in_axes=(axes, Inputs(0, None)), axis_name=AXIS))
    grads, new, metrics = mapped(jax.tree.map(place, state, own, split), inputs)
    new = jax.tree.map(lambda x, is_own: x if is_own else x[0], new, own)
    return jax.tree.map(lambda x: x[0], grads), new, jax.tree.map(lambda x: x[0], metrics)
