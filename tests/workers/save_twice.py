"""Saves two checkpoints, of which only the last is to be kept: python -m workers.save_twice DIR."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder


def made():
    """What takes steps, and a state, also to restore to."""
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1, 0.9), loss_fn)
    return ddp, ddp.init(0, make_batch())


def main(directory):
    ddp, state = made()
    checkpoints = CheckpointFolder(directory, keep=1)
    for step in (1, 2):
        state, _ = ddp.step(state, make_batch(seed=step))
        np.save(directory.parent / f"{step}.npy", np.asarray(state.params["Dense_0"]["kernel"]))
        checkpoints.save(step, state, {"saved": step})
    checkpoints.close()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main(Path(sys.argv[1]))
