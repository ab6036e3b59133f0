"""The toy regression of PyTorch's DDP tutorial: a small MLP, a squared error, random data.

    python examples/regression.py

There it takes a process group, a sampler and a loop per rank; here, a loss and a batch.
"""

import jax
import numpy as np
import optax
from flax import linen as nn

import jddp

BATCH_PER_REPLICA, NUM_INPUTS, NUM_HIDDEN, NUM_OUTPUTS = 20, 10, 10, 5


class ToyModel(nn.Module):
    """Two linear layers with a ReLU between them."""

    @nn.compact
    def __call__(self, x):
        """Returns (b, NUM_OUTPUTS) for `x` of (b, NUM_INPUTS)."""
        return nn.Dense(NUM_OUTPUTS)(nn.relu(nn.Dense(NUM_HIDDEN)(x)))


def loss_fn(model, batch):
    """Returns every example's squared error; jddp takes the mean over all replicas."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)


def main(num_steps=101):
    """Trains on every device of this machine, or of all machines, and returns the model."""
    ddp = jddp.DataParallel(ToyModel(), optax.sgd(0.01), loss_fn)
    rng = np.random.default_rng(seed=jax.process_index())  # Each process has its own rows.
    num_rows = BATCH_PER_REPLICA * jax.local_device_count()
    batch = {
        "x": rng.standard_normal((num_rows, NUM_INPUTS), dtype=np.float32),
        "y": rng.standard_normal((num_rows, NUM_OUTPUTS), dtype=np.float32),
    }
    state = ddp.init(seed=0, batch=batch)
    for i in range(num_steps):
        state, metrics = ddp.step(state, batch)
        if i % 20 == 0:
            print(f"step {i:3}: loss {metrics['loss']:.4f}")  # The mean over all replicas.
    return ddp.model(state)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
