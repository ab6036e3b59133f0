"""Your own loop, which may be killed at any instant: started again, it ends bitwise identical.

    python examples/own_loop.py runs/own_loop    # kill it, and start it again

The state has parameters, optimizer, random key and step; the position in the data is saved beside.
"""

import sys
import tempfile

import jax
import numpy as np
import optax
from flax import linen as nn

import jddp
from jddp.data import TrainBatches


class Net(nn.Module):
    """Two layers, with dropout between them."""

    @nn.compact
    def __call__(self, x, train):
        """Returns (b, 1) for `x` of (b, 8)."""
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(1)(x)


def loss_fn(model, batch, train):
    """Returns every example's squared error."""
    return (model(batch["x"], train) - batch["y"]) ** 2


def main(directory, num_steps=200, every=10):
    """Trains to the end, from the newest checkpoint in the directory if there is one."""
    x = np.random.default_rng(0).standard_normal((1000, 8), dtype=np.float32)
    batches = TrainBatches({"x": x, "y": x[:, :1] ** 2}, global_batch_size=128, seed=0)
    ddp = jddp.DataParallel(Net(), optax.adam(1e-2), loss_fn)
    state = ddp.init(seed=0, batch=batches.batch(0))
    checkpoints = jddp.Checkpoints(directory)
    if (found := checkpoints.restore(ddp)) is not None:
        state, extra = found
        batches.set_state(extra)
        print(f"resumed from step {int(state.step)}")
    for step in range(int(state.step) + 1, num_steps + 1):
        state, metrics = ddp.step(state, next(batches))
        if step % every == 0:
            print(f"step {step}: loss {metrics['loss']:.4f}", flush=True)
            checkpoints.save(ddp, state, batches.get_state())  # while the next steps are taken
    checkpoints.save(ddp, state, batches.get_state())
    checkpoints.wait()
    return state


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())
