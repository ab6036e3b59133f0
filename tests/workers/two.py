"""A process of a job of two, which runs one of these cases: python -m workers.two FOLDER CASE"""

import collections
import errno
import itertools
import json
import shutil
import sys
import threading
from pathlib import Path

import jax
import optax
from states import assert_same, bent
from tiny import MLP, ConvNet, loss_fn, make_batch, take_steps

import jddp
from jddp import distributed
from jddp.checkpoint import checkpoints
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.memory import HostMemory
from jddp.checkpoint.reader import put_on_devices
from jddp.engine.replay import ReplayedStep
from jddp.ground.errors import FileSystemError, ReplicaMismatchError

LENGTH, AT = 40, 4  # steps of a run, and the step at which a callback acts


def make_ddp():
    return jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)


def endless():
    return itertools.repeat(make_batch(8, seed=jax.process_index()))


def write(folder, found):
    (folder / f"process_{jax.process_index()}.json").write_text(json.dumps(found))


class Recorder(jddp.Callback):
    """Calls a function of the run after a step, in these processes; notes the saves of all."""

    def __init__(self, act=id, of=(), at=AT):
        self.act, self.of, self.at = act, of, at
        self.saved, self.acted_at = [], None

    def on_step(self, run, metrics):
        if metrics["step"] == self.at and jax.process_index() in self.of:
            self.acted_at = run.step
            self.act(run)

    def on_save(self, run):
        self.saved.append(run.step)


def compiles(folder):
    counts = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.split("/")[-1]]))
    ddp, batch = make_ddp(), make_batch(8)
    ddp.steps.lower(batch)
    take_steps(ddp, [batch, batch])
    ddp.evaluate(ddp.latest, [batch])
    write(folder, counts["compile_requests_use_cache"] - counts["cache_hits"])


# One process alone, or both, stop and save: at which steps each run ended and was saved, and why.


class SavesAtEnd(jddp.Callback):
    def on_end(self, run):
        if jax.process_index() == 0:
            run.save("end")


def stop_and_save(run):
    thread = threading.Thread(target=run.save, args=("both",))
    thread.start()
    thread.join()
    run.stop("enough")


def asks(folder):
    ddp, found = make_ddp(), {}

    def fit(name, *callbacks, **options):
        options = {"run_dir": folder / name, "save_every_steps": None, **options}
        run = jddp.fit(ddp, endless(), num_steps=LENGTH, callbacks=callbacks, **options)
        about = {"step": run.step, "stopped": run.stopped, "checkpoints": run.checkpoints}
        found[name] = about | {"asked_at": callbacks[0].acted_at, "saved": callbacks[0].saved}

    fit("stop", Recorder(lambda run: run.stop("time limit"), [1]))
    fit("save", Recorder(lambda run: run.save("kept"), [1]), SavesAtEnd())
    fit("both", Recorder(stop_and_save, [0, 1]), save_every_steps=AT)
    best, stop = jddp.KeepBest("loss"), jddp.EarlyStopping("loss", patience=1, min_delta=1e9)
    evaluated = {"evaluate": [make_batch(8, seed=2 + jax.process_index())], "eval_every_steps": 2}
    fit("watched", Recorder(), best, stop, **evaluated)
    found["watched"]["best"] = best.step
    fit("last", Recorder(stop_and_save, [1], at=LENGTH))
    write(folder, found)


# One step is saved in two folders at once. Process 1 cannot write into the first one, and votes on
# the second one before it says so; process 0 votes on the first one before the second.

FOLDERS = ("checkpoints", "best")


def two_folders(folder):
    has_voted = threading.Event()
    finish, gather = CheckpointFolder._finish, checkpoints.gather
    make_folder = checkpoints.make_folder

    def vote(*arguments, **options):
        has_voted.set()
        return gather(*arguments, **options)

    def finish_late(self, *arguments):
        is_late = self._directory.name == FOLDERS[1 - jax.process_index()]
        assert not is_late or has_voted.wait(60)
        return finish(self, *arguments)

    def refuse_first(path, **options):
        if jax.process_index() == 1 and path.name == "state" and FOLDERS[0] in path.parts:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make_folder(path, **options)

    CheckpointFolder._finish, checkpoints.gather = finish_late, vote
    checkpoints.make_folder = refuse_first
    state = make_ddp().init(0, make_batch(8))
    opened = [CheckpointFolder(folder / name, keep=1) for name in FOLDERS]
    for each in opened:
        each.save(AT, state, {})
    for name, each in zip(FOLDERS, opened, strict=True):
        try:
            each.close()
            print(name, "is saved")
        except FileSystemError as error:
            print(name, "is refused:", error)


# Steps are replayed, with batch norm over both processes; then a device of process 1 has one wrong
# bit of a parameter.


def replays(folder):
    net, batch = ConvNet(dropout_rate=0.3), next(endless())
    ddp = jddp.DataParallel(net, optax.sgd(0.1), loss_fn, strategy="zero1")
    state = ddp.init(0, batch)
    for _ in range(3):
        state, metrics = ddp.step(state, batch, make=ReplayedStep)
    print("loss", metrics["loss"])
    layer = state.params["Conv_0"]
    kernel = bent(layer["kernel"], device=1, place=0, mask=jax.process_index() << 20)
    state = state.replace(params=state.params | {"Conv_0": layer | {"kernel": kernel}})
    try:
        ddp.step(state, batch, make=ReplayedStep)
    except ReplicaMismatchError as error:
        print(error)


# Two hosts with a process each, as their folders say. One loses its memory, then the other one.

STRATEGIES = {"zero1": "zero1", "local": jddp.LocalSteps(2)}


def keeps_in_memory(folder):
    for name, strategy in STRATEGIES.items():
        ddp = jddp.DataParallel(MLP(), optax.adam(0.1), loss_fn, strategy=strategy)
        state, _ = take_steps(ddp, [next(endless())] * 3)
        layouts = ddp.steps.layouts(state)
        for lost in ([0], [1], [0, 1]):
            own = HostMemory(f"{name}{len(lost)}", state)
            own.save(2, state, {"lost": lost}, layouts)
            if jax.process_index() in lost:
                shutil.rmtree(own.folder)
            own.close(keeps=True)
            own = HostMemory(f"{name}{len(lost)}", state)  # as after a restart
            saved = own.newest()
            assert (saved is None) == (len(lost) == 2), (name, lost)
            if saved is not None:
                assert saved.beside == {"lost": lost}
                assert_same(put_on_devices(saved, state, layouts).state, state)
            own.close(keeps=False)


if __name__ == "__main__":
    distributed.initialize(distributed.resolve_identity())
    globals()[sys.argv[2]](Path(sys.argv[1]))
