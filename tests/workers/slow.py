"""A process of a job in which process 1 is slow, in one phase after the other.

python -m workers.slow FOLDER
"""

import sys
import time
from pathlib import Path

import jax
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed

NUM_STEPS = 10
SECONDS = 0.2


def wait():
    if jax.process_index() == 1:
        time.sleep(SECONDS)


def batches(*, is_slow):
    for step in range(NUM_STEPS):
        if is_slow:
            wait()
        yield make_batch(8, seed=2 * step + jax.process_index())


class Writes(jddp.Callback):
    def on_step(self, run, metrics):
        wait()


def train(run_dir, *, is_slow=False, callbacks=()):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)
    plan = {"num_steps": NUM_STEPS, "log_every_steps": 1, "run_dir": run_dir}
    jddp.fit(ddp, batches(is_slow=is_slow), callbacks=callbacks, **plan)


if __name__ == "__main__":
    distributed.initialize(distributed.resolve_identity())
    folder = Path(sys.argv[1])
    train(folder / "data", is_slow=True)
    train(folder / "host", callbacks=[Writes()])
