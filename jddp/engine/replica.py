"""What a loss, or one's own loop, may ask of the replicas: all rows, and a key for each of them.

features = jddp.all_gather(model(batch["x"]))     # in a loss: the rows of all replicas
keys = jddp.replica_key(state, "environment")     # in a loop: a key for each replica
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jddp.engine.mesh import AXIS_HERE, sharded
from jddp.engine.state import TrainState
from jddp.modules.functional import stream
from jddp.typing import PyTree


def all_gather(tree: PyTree, axis: str | None = None) -> PyTree:
    """The rows of all replicas, in their order, inside a loss.

    For losses that couple examples, such as contrastive ones. A mean over rows needs no gathering:
    see `jddp.Mean`, and `jax.lax.pmean` for a mean that is multiplied with another. Gradients flow
    back to the replica that a row came from, so that they are those of one device with the whole
    batch. With `accumulate_steps`, rows of one part meet; in evaluation, rows of padding are among
    them.

    Args:
      tree: Arrays of shape (b, ...), one share of each replica.
      axis: Name of the mapped axis, in a step of your own; by default the axis of the step that
        calls the loss.

    Returns:
      Arrays of shape (replicas * b, ...).
    """
    return jax.tree.map(lambda x: lax.all_gather(x, axis or AXIS_HERE.get(), tiled=True), tree)


def replica_key(state: TrainState, name: str = "replica") -> jax.Array:
    """A key for each replica, of the step that the state is before.

    The rule is that of all random numbers here: the base key, folded with the step, with the
    replica's number and with the CRC-32 of a name. So a run that resumes draws the same again, and
    no model draws what is drawn from here, unless it has a stream of that name.

    Args:
      state: From `init` or `step`.
      name: Of what is drawn.

    Returns:
      Keys of shape (replicas,), one on each device.
    """
    mesh = state.step.sharding.mesh
    return _replica_keys(sharded(mesh), name)(state.key, state.step)


@functools.cache
def _replica_keys(rows: NamedSharding, name: str) -> Any:
    def fold(key: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, step)
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(rows.mesh.size))
        return jax.vmap(lambda key: stream(key, name))(keys)

    return jax.jit(fold, out_shardings=rows)
