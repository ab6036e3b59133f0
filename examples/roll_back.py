"""A run that restores an earlier state when its loss jumps, and skips the batches of the jump.

    python examples/roll_back.py

A loss that jumps and is still finite is no error: a callback decides what to do. This one keeps a
copy of the state in the devices' memory, and restores it; the data continue after the jump, as in
the training of large language models.
"""

import statistics
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import optax
from regression import BATCH_PER_REPLICA, NUM_INPUTS, ToyModel, loss_fn

import jddp


class RollBack(jddp.Callback):
    """Restores the state of some steps ago where the loss is far above the last ones.

    Args:
      factor: Ratio to the median of the last `window` losses that is a jump.
      every_steps: Steps between copies of the state.
      window: Number of losses in the median.

    Attributes:
      steps: Steps of the jumps.
    """

    def __init__(self, factor=5.0, every_steps=20, window=10):
        self.factor, self.every_steps = factor, every_steps
        self.losses, self.steps, self.kept = deque(maxlen=window), [], None

    def on_step(self, run, metrics):
        """Checks the loss, which is the same on all processes: so all restore together."""
        is_usual = not self.losses or metrics["loss"] <= self.factor * statistics.median(
            self.losses
        )
        if not is_usual and self.kept is not None:
            self.steps.append(metrics["step"])
            # The count of steps stays that of the run, as does the position in the data.
            run.state = jax.tree.map(jnp.copy, self.kept).replace(step=run.state.step)
            return
        self.losses.append(metrics["loss"])
        if metrics["step"] % self.every_steps == 0:
            self.kept = jax.tree.map(jnp.copy, run.state)


def batches(num_batches, bad=()):
    """Rows on a straight line; those of the `bad` batches are noise."""
    rng = np.random.default_rng(seed=0)
    rows = BATCH_PER_REPLICA * jax.local_device_count()
    for number in range(1, num_batches + 1):
        x = rng.standard_normal((rows, NUM_INPUTS), dtype=np.float32)
        y = x[:, :5] if number not in bad else 100 * rng.standard_normal((rows, 5), np.float32)
        yield {"x": x, "y": y}


def main(num_steps=101, bad=(50,)):
    """Trains through a bad batch, and returns the run and the steps at which it went back."""
    ddp, roll_back = jddp.DataParallel(ToyModel(), optax.sgd(0.1), loss_fn), RollBack()
    run = jddp.fit(
        ddp, batches(num_steps, bad), num_steps=num_steps, callbacks=[roll_back], log_every_steps=20
    )
    print(f"went back at steps {roll_back.steps}; the last loss is {run.metrics['loss']:.4f}")
    return run, roll_back.steps


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
