"""A training step of your own, with the averaged gradients of jddp: under `pmap` and `shard_map`.

    python examples/bring_your_own_step.py

`jddp.average_gradients` is the first link of the optimizer's chain and averages gradients over the
replicas. The rest of `jddp.DataParallel` is your code here: the means of the loss and of batch
statistics, the placement of state and batch, and splitting rows over the devices.

Three ways to map one step; all end with the same parameters:

- `shard_map(check_vma=False)`: gradients stay those of each replica. Works with any model.
- `shard_map` with its default check: JAX tracks which values differ between replicas, and sums
  gradients of parameters that do not, by itself. So parameters are marked as varying first, by
  `pcast`. jddp refuses gradients that are summed already: their mean would be N times too large.
- `pmap`: the step of older programs, with a leading dim for the devices on state and batch.

Every tenth loss is read, which waits for the devices: XLA:CPU deadlocks once some thirty programs
of many virtual devices wait. GPUs do not, and `jddp.DataParallel` sees to it by itself.
"""

import functools

import jax
import numpy as np
import optax
from flax import linen as nn
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import jddp

AXIS = "batch"
NUM_CLASSES = 5


class Model(nn.Module):
    """A hidden layer with batch norm, whose running statistics are state beside the parameters."""

    @nn.compact
    def __call__(self, x, train):
        """Returns (b, NUM_CLASSES) for `x` of (b, features)."""
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(32)(x))
        return nn.Dense(NUM_CLASSES)(nn.relu(x))


def mean_loss(params, statistics, batch):
    """Returns the mean loss over this replica's rows, and the new statistics."""
    variables = {"params": params, "batch_stats": statistics}
    logits, new = Model().apply(variables, batch["x"], train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), new["batch_stats"]


def replica_step(optimizer, own_gradients, state, batch):
    """One step of one replica: your code, with one mean in the optimizer and two here."""
    params, statistics, opt_state = state
    (loss, statistics), grads = own_gradients(params, statistics, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)  # the bucketed mean, then SGD
    params = optax.apply_updates(params, updates)
    # Of this replica's rows until here. `jddp.sync_batch_norm(model, AXIS)` is the alternative: a
    # model that normalizes with the statistics of all rows.
    loss, statistics = lax.pmean((loss, statistics), AXIS)
    return (params, statistics, opt_state), loss


own_gradients = jax.value_and_grad(mean_loss, has_aux=True)


def gradients_at_varying(params, statistics, batch):
    """The gradients for a checked step: varying parameters have varying gradients."""
    params = lax.pcast(params, AXIS, to="varying")
    return own_gradients(params, statistics, batch)


def make_shard_map_step(optimizer, mesh, *, check_vma):
    """Returns `step(state, batch)` for a replicated state and rows split over the mesh."""
    gradients = gradients_at_varying if check_vma else own_gradients
    step = jax.shard_map(
        functools.partial(replica_step, optimizer, gradients),
        mesh=mesh,
        in_specs=(P(), P(AXIS)),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(step, donate_argnums=0)


def train_with_shard_map(state, optimizer, batches, *, check_vma):
    """Trains on all devices; returns the parameters."""
    # Axes of type Auto: the default of `jax.make_mesh` is Explicit.
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    step = make_shard_map_step(optimizer, mesh, check_vma=check_vma)
    state = jax.device_put(state, replicated)
    for i, batch in enumerate(batches, start=1):
        state, loss = step(state, jax.device_put(batch, split))
        if i % 10 == 0:
            print(f"shard_map(check_vma={check_vma}), step {i}: loss {loss:.4f}")
    return state[0]


def train_with_pmap(state, optimizer, batches):
    """Trains on all devices; returns the parameters."""
    num_devices = jax.local_device_count()
    step = jax.pmap(
        functools.partial(replica_step, optimizer, own_gradients), axis_name=AXIS, donate_argnums=0
    )
    state = jax.tree.map(lambda x: np.stack([x] * num_devices), state)
    for i, batch in enumerate(batches, start=1):
        rows = jax.tree.map(lambda x: x.reshape(num_devices, -1, *x.shape[1:]), batch)
        state, loss = step(state, rows)
        if i % 10 == 0:
            print(f"pmap, step {i}: loss {loss[0]:.4f}")
    return jax.tree.map(lambda x: x[0], state[0])


def make_batches(num_steps, num_rows=64):
    """Returns batches of rows that a linear rule has labelled."""
    rng = np.random.default_rng(0)
    rule = rng.standard_normal((16, NUM_CLASSES), dtype=np.float32)
    rows = rng.standard_normal((num_steps, num_rows, 16), dtype=np.float32)
    return [{"x": x, "y": (x @ rule).argmax(-1)} for x in rows]


def main(num_steps=50):
    """Trains in the three ways; returns the first parameters, and those at the end of each."""
    batches = make_batches(num_steps)
    optimizer = optax.chain(jddp.average_gradients(AXIS), optax.sgd(0.3, momentum=0.9))
    variables = Model().init(jax.random.key(0), batches[0]["x"], train=False)
    params, statistics = jax.device_get((variables["params"], variables["batch_stats"]))
    state = params, statistics, jax.device_get(optimizer.init(params))
    return params, {
        "unchecked": train_with_shard_map(state, optimizer, batches, check_vma=False),
        "checked": train_with_shard_map(state, optimizer, batches, check_vma=True),
        "pmap": train_with_pmap(state, optimizer, batches),
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
