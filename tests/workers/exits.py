"""A process of a job, in all of whose processes a callback exits: python -m workers.exits FOLDER.

It writes which steps its callbacks were called for, those behind the one that exits included.
"""

import itertools
import json
import sys
from pathlib import Path

import jax
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed

AT = 4


class Exits(jddp.Callback):
    def on_step(self, run, metrics):
        if metrics["step"] == AT:
            sys.exit(3)


class Recorder(jddp.Callback):
    def __init__(self):
        self.steps = []

    def on_step(self, run, metrics):
        self.steps.append(metrics["step"])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    distributed.initialize(distributed.resolve_identity())
    ddp, recorder = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn), Recorder()
    options = {"num_steps": 20, "run_dir": folder / "run", "log_every_steps": 1}
    try:
        batches = itertools.repeat(make_batch(8, seed=jax.process_index()))
        jddp.fit(ddp, batches, callbacks=[Exits(), recorder], **options)
    except SystemExit as error:
        found = {"code": error.code, "step": error.run.step, "called_for": recorder.steps}
        (folder / f"process_{jax.process_index()}.json").write_text(json.dumps(found))
