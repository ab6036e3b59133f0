"""A process of a job whose loss jumps in one step: python -m workers.spikes DIR

It writes the parameters that it ends with, and the steps that were reported to it as spikes.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed
from jddp.engine.state import by_path

LENGTH, BAD = 70, 60


class Spikes(jddp.Callback):
    """The steps of all spikes."""

    def __init__(self):
        self.steps = []

    def on_step(self, run, metrics):
        self.steps += [metrics["step"]] if "spike" in metrics else []


def batches(process, num_processes):
    """The rows of one process, of which the first one's are wrong in the bad step."""
    for step in range(1, LENGTH + 1):
        batch = make_batch(8, seed=step % 5)
        own = {name: np.split(x, num_processes)[process] for name, x in batch.items()}
        yield {**own, "x": 1000 * own["x"]} if step == BAD and process == 0 else own


def train_through(folder, process, num_processes):
    """Trains as one process of some, and writes what it ends with."""
    ddp, spikes = jddp.DataParallel(MLP(), optax.adam(1e-3), loss_fn, mesh=2), Spikes()
    given = batches(process, num_processes)
    run = jddp.fit(
        ddp,
        given,
        num_steps=LENGTH,
        checks=jddp.Checks(on_spike="skip"),
        callbacks=[spikes],
    )
    params = {name: np.asarray(x) for name, x in by_path(run.state.params).items()}
    skipped = int(run.state.skipped)
    np.savez(folder / f"process_{process}.npz", steps=spikes.steps, skipped=skipped, **params)


if __name__ == "__main__":
    distributed.initialize(distributed.resolve_identity())
    train_through(Path(sys.argv[1]), jax.process_index(), jax.process_count())
