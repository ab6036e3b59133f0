"""A process of a job in which one process alone, or both, stop and save: python -m workers.asks DIR

It writes at which steps each run ended and was saved, and why.
"""

import itertools
import json
import sys
import threading
from pathlib import Path

import jax
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed

LENGTH, AT = 40, 4


class Asks(jddp.Callback):
    """Calls a function of the run after a step, in these processes; notes the steps of all."""

    def __init__(self, ask, *, of, at=AT):
        self.ask, self.of, self.at, self.saved, self.asked_at = ask, of, at, [], None

    def on_step(self, run, metrics):
        if metrics["step"] == self.at and jax.process_index() in self.of:
            self.asked_at = run.step
            self.ask(run)

    def on_save(self, run):
        self.saved.append(run.step)


class SavesAtEnd(jddp.Callback):
    def on_end(self, run):
        if jax.process_index() == 0:
            run.save("end")


def stop_and_save(run):
    run.stop("enough")
    run.save("both")


def in_a_thread(run):
    thread = threading.Thread(target=run.save, args=("button",))
    thread.start()
    thread.join()


def train_all(folder):
    ddp, found = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn), {}

    def fit(name, *callbacks, **options):
        batches = itertools.repeat(make_batch(8, seed=jax.process_index()))
        options = {"run_dir": folder / name, "save_every_steps": None, **options}
        run = jddp.fit(ddp, batches, num_steps=LENGTH, callbacks=callbacks, **options)
        found[name] = {
            "step": run.step,
            "stopped": run.stopped,
            "asked_at": callbacks[0].asked_at,
            "saved": callbacks[0].saved,
            "checkpoints": run.checkpoints,
        }

    for number in range(2):
        fit(f"stop {number}", Asks(lambda run: run.stop("time limit"), of=[number]))
    fit("save", Asks(lambda run: run.save("kept"), of=[1]), SavesAtEnd())
    fit("thread", Asks(in_a_thread, of=[1]))
    fit("both", Asks(stop_and_save, of=[0, 1]), save_every_steps=AT)
    best, stop = jddp.KeepBest("loss"), jddp.EarlyStopping("loss", patience=1, min_delta=1e9)
    evaluated = {"evaluate": [make_batch(8, seed=2 + jax.process_index())], "eval_every_steps": 2}
    fit("watched", Asks(id, of=[]), best, stop, **evaluated)
    found["watched"]["best"] = best.step
    fit("last", Asks(stop_and_save, of=[1], at=LENGTH))
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    distributed.initialize(distributed.resolve_identity())
    text = json.dumps(train_all(folder))
    (folder / f"process_{jax.process_index()}.json").write_text(text)
