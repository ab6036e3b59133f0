"""Runs the step of many replicas on one device, side by side under `jax.vmap`.

N devices must equal it if each replica draws its own random numbers.
"""

import functools

import jax
import jax.numpy as jnp

from jddp.data_parallel import DataParallel
from jddp.engine.mesh import mapped_over
from jddp.engine.state import Divided, Inputs, Layout, Replicated, Sharded, TrainState
from jddp.engine.step import replica_gradients, replica_step
from jddp.modules.rows import split_rows
from jddp.typing import Batch, Grads, Leaf, Metrics, PyTree


def side_by_side(
    ddp: DataParallel, state: TrainState, batch: Batch, constants: PyTree
) -> tuple[Grads, TrainState, Metrics]:
    """Takes the step of all replicas of `ddp` on its first device.

    Args:
      ddp: Model of many replicas.
      state: A state of these replicas; it is not changed.
      batch: Rows that divide over the devices.
      constants: Constants of the step.

    Returns:
      The averaged gradients, the new state, and the metrics.
    """
    spec, plan = ddp.steps.spec, ddp.steps.planned(batch).plan
    layouts = ddp.steps.layouts(state)
    axes = jax.tree.map(lambda layout: None if layout == Replicated() else 0, layouts)
    spec = spec.placed(layouts.params)

    def replica(state: TrainState, inputs: Inputs) -> tuple[Grads, TrainState, Metrics]:
        grads, _ = replica_gradients(spec, plan, state, inputs)
        return grads, *replica_step(spec, plan, state, inputs)

    split = functools.partial(split_rows, num=ddp.mesh.size)

    def rows(x: Leaf, layout: Layout) -> Leaf:
        if isinstance(layout, Divided):
            return jnp.stack(jnp.split(x, ddp.mesh.size, axis=layout.dim))
        return split(x) if isinstance(layout, Sharded) else x

    state = jax.tree.map(rows, state, layouts)
    given = jax.device_put((state, Inputs(split(batch), constants)), ddp.mesh.devices.flat[0])
    replica = mapped_over(spec.axis)(replica)
    mapped = jax.jit(jax.vmap(replica, in_axes=(axes, Inputs(0, None)), axis_name=spec.axis))
    grads, new, metrics = mapped(*given)

    def joined(x: Leaf, layout: Layout) -> Leaf:
        if isinstance(layout, Divided):
            return jnp.concatenate([*x], axis=layout.dim)
        return x[0] if layout == Replicated() else x

    new = jax.tree.map(joined, new, layouts)
    return jax.tree.map(lambda x: x[0], grads), new, jax.tree.map(lambda x: x[0], metrics)
