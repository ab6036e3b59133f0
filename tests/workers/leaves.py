"""A process of a job, of which one leaves before the others: python -m workers.leaves HOW N."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jddp
from jddp import distributed
from jddp.distributed import coordination, failure

HOW, NUMBER = sys.argv[1], int(sys.argv[2])
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(-1, 1)
BATCH = {"x": X, "y": 2 * X}

distributed.initialize(distributed.resolve_identity())
IS_ONE = jax.process_index() == NUMBER


def leave():
    """Marks the moment for the test."""
    Path("left").touch()


def loss_fn(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1)


class Callback(jddp.Callback):
    def on_step(self, run, metrics):
        if IS_ONE and metrics["step"] == 4:
            leave()
            if HOW == "raise":
                raise RuntimeError("a bug of mine")
            sys.exit(3)


def take_steps(num):
    state = ddp.init(0, BATCH)
    for _ in range(num):
        state, metrics = ddp.step(state, BATCH)
        float(metrics["loss"])


def work_on():
    """Waits until this process has seen often that the other has left, and might judge it."""
    failure._PATIENCE, seen, listener = 0.0, 0, failure.Listener()
    while seen < 3:
        seen += bool(coordination.published(failure._LEFT)) and not listener.listen()


ddp = jddp.DataParallel(nn.Dense(1), optax.sgd(0.1), loss_fn)
if HOW == "answer":
    if IS_ONE:
        leave()
    else:
        coordination.gather("never", "", timeout_seconds=600)
elif HOW in ("exit", "raise"):
    options = {"callbacks": [Callback()], "checks": jddp.Checks(same_batches=True)}
    jddp.fit(ddp, itertools.repeat(BATCH), num_steps=10**9, **options)
elif HOW == "ordinary":
    take_steps(4)
    if not IS_ONE:
        work_on()
else:
    take_steps(4 if IS_ONE and HOW == "stop" else 10**9)
    leave()
