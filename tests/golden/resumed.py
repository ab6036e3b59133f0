"""Runs that are stored after half of their steps, and the losses of the other half.

    python -m golden.resumed FOLDER NAME NUM_STEPS    # a process of a job, by its environment

A run of two processes is written by two, and resumed by two.
"""

import sys
from pathlib import Path

import jax
import optax
from flax import nnx
from runs import of_job, records, run_module
from tiny import ConvNet, NnxConvNet, loss_fn, make_batch

import jddp
from jddp import distributed
from jddp.data import ArrayExamples, Epochs, TrainBatches, eval_batches
from jddp.distributed.join import configure_devices

HALF, WHOLE = 6, 12
SECONDS = 240
EXAMPLES, TEST = make_batch(40), make_batch(11, seed=1)


def linen(**options):
    return jddp.DataParallel(ConvNet(None, dropout_rate=0.3), optax.adam(1e-2), loss_fn, **options)


def of_nnx(**options):
    model = NnxConvNet(nnx.Rngs(0), None, dropout_rate=0.3)
    return jddp.DataParallel(model, optax.adam(1e-2), loss_fn, **options)


EVERYTHING = {"ema_decay": 0.9, "max_grad_norm": 1.0, "skip_nonfinite": True}
# The object that is trained, and the number of processes.
RUNS = {
    "ddp": (lambda: linen(**EVERYTHING), 1),
    "ddp_of_two": (lambda: linen(**EVERYTHING), 2),
    "zero1": (lambda: linen(strategy="zero1", accumulate_steps=2), 1),
    "zero1_of_two": (lambda: linen(strategy="zero1"), 2),
    "fsdp": (lambda: linen(strategy="fsdp"), 1),
    "fsdp_of_two": (lambda: linen(strategy="fsdp"), 2),
    "nnx": (lambda: of_nnx(), 1),
    "nnx_fsdp": (lambda: of_nnx(strategy="fsdp"), 1),
    "nnx_of_two": (lambda: of_nnx(strategy="zero1"), 2),
    "local_steps": (lambda: linen(strategy=jddp.LocalSteps(3), batch_norm="local"), 1),
    "loss_scale": (lambda: linen(precision="float16"), 1),
    "powersgd": (lambda: linen(reduction=jddp.Reduction(hook=jddp.powersgd(1))), 1),
}


def train(name, run_dir, num_steps):
    """Trains or resumes a run, as one of its processes."""
    make, _ = RUNS[name]
    share = {"process_index": jax.process_index(), "num_processes": jax.process_count()}
    test = eval_batches(ArrayExamples(TEST), global_batch_size=8, **share)
    jddp.fit(
        make(),
        TrainBatches(ArrayExamples(EXAMPLES), global_batch_size=16, seed=1, **share),
        num_steps=num_steps,
        seed=3,
        evaluate=test,
        run_dir=run_dir,
        callbacks=[jddp.KeepBest(), jddp.EarlyStopping(patience=50)],
        log_every_steps=1,
        eval_every_steps=Epochs(1),
        save_every_steps=3,
    )


def train_by_all(name, run_dir, num_steps):
    """Trains or resumes a run, in as many processes as it is of; returns its records."""
    num_processes = RUNS[name][1]
    if num_processes == 1:
        train(name, run_dir, num_steps)
    else:
        run_module("golden.resumed", run_dir, of_job(num_processes), SECONDS, name, str(num_steps))
    return records(run_dir)


def losses_after(found, step):
    """The losses and accuracies of later steps and evaluations, by split and step."""
    return {
        f"{record['split']} {record['step']}": [record["loss"], record["accuracy"]]
        for record in found
        if record["step"] > step
    }


if __name__ == "__main__":
    identity = distributed.resolve_identity()
    configure_devices(8, num_processes=identity.num_processes)
    distributed.initialize(identity)
    folder, name, num_steps = sys.argv[1:]
    train(name, Path(folder), int(num_steps))
