"""A process of a job in which process 1 is slow, in one phase after the other.

python -m workers.slow FOLDER
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed
from jddp.trainer import timing

NUM_STEPS = 10
SECONDS = 0.2


def wait():
    if jax.process_index() == 1:
        time.sleep(SECONDS)
    return np.float32(0)


def batches(*, is_slow):
    for step in range(NUM_STEPS):
        if is_slow:
            wait()
        yield make_batch(8, seed=2 * step + jax.process_index())


def slow_loss(model, batch, train):
    losses, metrics = loss_fn(model, batch, train)
    return losses + jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32)), metrics


class Writes(jddp.Callback):
    def on_step(self, run, metrics):
        wait()


def train(run_dir, loss=loss_fn, *, is_slow=False, callbacks=()):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss)
    plan = {"num_steps": NUM_STEPS, "log_every_steps": 1, "run_dir": run_dir}
    jddp.fit(ddp, batches(is_slow=is_slow), callbacks=callbacks, **plan)


if __name__ == "__main__":
    distributed.initialize(distributed.resolve_identity())
    folder = Path(sys.argv[1])
    train(folder / "data", is_slow=True)
    train(folder / "host", callbacks=[Writes()])
    if jax.process_index() == 1:
        timing.DIM["cpu"] *= 4  # 64 times the work stands for slow devices
    train(folder / "compute", slow_loss)
