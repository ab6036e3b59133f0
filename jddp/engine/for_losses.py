"""Functions for losses and custom loops: the rows of all replicas, and a key for each replica.

features = jddp.all_gather(model(batch["x"]))     # in a loss: the rows of all replicas
keys = jddp.replica_key(state, "environment")     # in a loop: a key for each replica
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array

from jddp.engine.mesh import AXIS_HERE, sharded
from jddp.engine.state import TrainState
from jddp.modules.functional import stream
from jddp.typing import PyTree


def all_gather(tree: PyTree, axis: str | None = None) -> PyTree:
    """The rows of all replicas, in their order, inside a loss.

    For losses that couple examples, such as contrastive ones. A mean over rows needs no gathering:
    see `jddp.Mean`, and `jax.lax.pmean` for a mean that is multiplied with another. Gradients flow
    back to the replica that a row came from, so that they are those of one device with the whole
    batch. With `accumulate_steps` they are the rows of one micro-batch; in evaluation, rows of
    padding are among them.

    Args:
      tree: Arrays of shape (b, ...), the rows of each replica.
      axis: Name of the mapped axis, in a step of your own; by default the axis of the step that
        calls the loss.

    Returns:
      Arrays of shape (replicas * b, ...).
    """
    # Its transpose is a reduce-scatter: the gradient of a row, which all replicas use, is summed
    # where the row came from.
    return jax.tree.map(lambda x: lax.all_gather(x, axis or AXIS_HERE.get(), tiled=True), tree)


def replica_key(state: TrainState, name: str = "replica") -> Array:
    """One PRNG key per replica, for the next step of the state.

    The rule is that of all random numbers here: the base key, folded with the step, with the
    replica's number and with the CRC-32 of a name. So a resumed run repeats the same numbers,
    and no model shares them, unless it has a stream of that name; the `key` of a loss is the
    stream "loss".

    Args:
      state: State from `init` or `step`.
      name: Name of the stream of random numbers.

    Returns:
      Keys of shape (replicas,), one on each device.
    """
    return _replica_keys(state.key, state.step, sharded(state.step.sharding.mesh), name)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _replica_keys(key: Array, step: Array, rows: NamedSharding, name: str) -> Array:
    # Folded, and not split and carried: the key of any step follows from the base key, so that a
    # resumed run needs no other state, whatever happened between.
    key = jax.random.fold_in(key, step)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(rows.mesh.size))
    return lax.with_sharding_constraint(jax.vmap(lambda key: stream(key, name))(keys), rows)
