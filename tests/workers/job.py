"""One process of a job that trains by hand and by `fit`, is interrupted, and resumes."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from tiny import ConvNet, loss_fn, make_batch

import jddp
from jddp import distributed
from jddp.data import ArrayExamples, TrainBatches, eval_batches
from jddp.distributed.join import configure_devices
from jddp.engine.mesh import copy_off_mesh

NUM_DEVICES = 8
EXAMPLES, TEST = make_batch(40), make_batch(11, seed=1)
# Parts of two evaluation batches, by process: never as many as devices, and one of them empty.
PARTS = {
    1: [[slice(0, 7), slice(7, 11)]],
    2: [[slice(0, 5), slice(7, 11)], [slice(5, 7), slice(11, 11)]],
}


class Broken(Exception):
    """What ends a run that is to be resumed."""


class BreakOff(jddp.Callback):
    def on_step(self, run, metrics):
        if metrics["step"] == 3:
            raise Broken


def keep(path, metrics, state):
    """Writes numbers and this process's view of all leaves, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(state.replace(key=None))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    metrics = {f"metrics/{name}": x for name, x in metrics.items() if not isinstance(x, str)}
    arrays = {f"state/{name}": np.array(copy_off_mesh(x)) for name, x in named.items()}
    np.savez(path, **metrics, **arrays)


def train_everything(folder, process_index, num_processes):
    """Writes what this process ends up with into `folder`, which all processes share."""
    share = {"process_index": process_index, "num_processes": num_processes}

    def batches():
        return TrainBatches(ArrayExamples(EXAMPLES), global_batch_size=16, seed=1, **share)

    def made():  # SGD: Adam would turn the rounding of sums into whole updates.
        model, optimizer = ConvNet(dropout_rate=0.3), optax.sgd(0.2, momentum=0.9)
        return jddp.DataParallel(model, optimizer, loss_fn, ema_decay=0.5)

    ddp = made()
    source, losses = batches(), []
    state = ddp.init(seed=3, batch=source.batch(0))
    for _ in range(3):
        state, metrics = ddp.step(state, next(source))
        losses.append(float(metrics["loss"]))
    saved = jddp.Checkpoints(folder / "own")
    saved.save(ddp, state, {"losses": losses})
    parts = [{k: x[part] for k, x in TEST.items()} for part in PARTS[num_processes][process_index]]
    evaluated = ddp.evaluate(state, parts)
    keep(folder / f"step_{process_index}.npz", {"losses": losses, **evaluated}, state)

    saved.wait()
    own = made()
    own.init(seed=4, batch=source.batch(0))
    state, extra = jddp.Checkpoints(folder / "own").restore(own)
    state, _ = own.step(state, next(source))
    keep(folder / f"own_{process_index}.npz", extra | own.evaluate(state, parts), state)

    def fit(*callbacks, ddp=ddp, run_dir=folder / "run"):
        test = eval_batches(ArrayExamples(TEST), global_batch_size=8, **share)
        plan = {"log_every_steps": 1, "eval_every_steps": 2, "save_every_steps": 2}
        plan |= {"evaluate": test, "callbacks": callbacks, "run_dir": run_dir}
        return jddp.fit(ddp, batches(), num_steps=4, seed=3, **plan)

    try:
        fit(BreakOff())
    except Broken:
        run = fit()
    keep(folder / f"fit_{process_index}.npz", run.eval_metrics, run.state)

    ways = {"split": "zero1", "divided": "fsdp", "grouped": jddp.FSDP(group_size=4)}
    for name, strategy in ways.items():
        options = {"max_grad_norm": 0.5, "strategy": strategy}
        split = jddp.DataParallel(ConvNet(), optax.sgd(0.2, momentum=0.9), loss_fn, **options)
        try:
            fit(BreakOff(), ddp=split, run_dir=folder / name)
        except Broken:
            run = fit(ddp=split, run_dir=folder / name)
        params = multihost_utils.process_allgather(run.state.params, tiled=True)
        state = run.state.replace(opt_state=(), params=params)
        keep(folder / f"{name}_{process_index}.npz", run.eval_metrics, state)


if __name__ == "__main__":
    identity = distributed.resolve_identity()
    configure_devices(NUM_DEVICES, num_processes=identity.num_processes)
    distributed.initialize(identity)
    train_everything(Path(sys.argv[1]), identity.process_id, identity.num_processes)
