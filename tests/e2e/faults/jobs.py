"""Start `python -m jddp.train` as the processes of a job, wait for a condition, disturb them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from runs import environment, free_port, records, wait_until

from jddp.distributed.identity import VARIABLES

SECONDS = 120  # for what takes ten

# Everything that a state can hold, in steps of a millisecond.
MINE = """
import ctypes
import os
import time
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn

from jddp.data import ArrayExamples


class Line(nn.Module):
    dropout_rate: float = 0.2
    width: int = int(os.environ.get("WIDTH", 8))  # which no config knows

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(nn.Dense(self.width)(nn.Dropout(self.dropout_rate, deterministic=not train)(x)))
        return nn.Dense(1)(x)


class Examples(ArrayExamples):
    # What a test has put into the folder happens to the process of that number.
    def take(self, indices):
        me = jax.process_index()
        while Path(f"hang-{me}").exists():
            Path(f"hangs-{me}").touch()
            time.sleep(0.05)
        if Path(f"hold-{me}").exists():
            ctypes.PyDLL(None).sleep(1000)  # and does not let go of the interpreter's lock
        if Path(f"fail-{me}").exists():
            raise RuntimeError("a bug in reading")
        if Path(f"exit-{me}").exists():
            raise SystemExit(0)
        batch = super().take(indices)
        if Path(f"nan-{me}").exists():
            batch["x"][0] = np.nan
        return batch


class TestExamples(ArrayExamples):
    def take(self, indices):
        if Path("fail-test").exists():
            raise RuntimeError("a bug in evaluation")
        return super().take(indices)


def points(num_test=7):
    x = np.linspace(-1, 1, 4000, dtype=np.float32).reshape(-1, 2)
    both = {"x": x, "y": 2 * x[:, :1]}
    return Examples(both), TestExamples({name: x[:num_test] for name, x in both.items()})
"""
CONFIG = """
train: {num_steps: 1000, log_every_steps: 10}
data: {target: "mine:points", global_batch_size: 8}
model: {target: "mine:Line"}
loss: {name: mean_squared_error}
optimizer: {name: adam, learning_rate: 0.001}
ddp: {ema_decay: 0.99}
mesh: {num_devices: 2}
checkpoint: {every_steps: 200, keep: 2}
"""


def make_folder(folder, cache):
    """A user's folder, with a module and a config; jobs in it share what others have compiled."""
    folder.mkdir(exist_ok=True)
    (folder / "cache").write_text(str(cache))
    (folder / "mine.py").write_text(MINE)
    (folder / "job.yaml").write_text(CONFIG)
    return folder


FEW = ["train.num_steps=6", "train.log_every_steps=1", "mesh.num_devices=auto"]


def variables_of(folder, **variables):
    """Those of a process that trains in a folder of `make_folder`."""
    return environment(**{"XDG_CACHE_HOME": (folder / "cache").read_text(), **variables})


def train_command(run, *arguments):
    command = [sys.executable, "-m", "jddp.train", "--config", "job.yaml"]
    return [*command, f"run.dir={run}", *arguments]


def saved_steps(run_dir):
    """Steps of the finished checkpoints."""
    return sorted(int(x.name) for x in run_dir.glob("checkpoints/*") if x.name.isdecimal())


def result(folder, run="run"):
    """Records without times, and the step and the arrays' digests of the last checkpoint."""
    step = saved_steps(folder / run)[-1]
    digests = (folder / run / "checkpoints" / str(step) / "arrays.json").read_text()
    return records(folder / run), step, json.loads(digests)


def assert_alike(got, want):
    """Equal records, but for the order in which sums over processes are made."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            is_number = isinstance(value, float)
            assert one[name] == (pytest.approx(value, rel=1e-4) if is_number else value)


class Job:
    """The processes of one job, which are ended with the block."""

    def __init__(
        self,
        folder,
        *arguments,
        num_processes=1,
        variables=(),
        last_arguments=(),
        last_variables=(),
        last_folder=None,
        start_new_session=False,
    ):
        runs = [x.removeprefix("run.dir=") for x in arguments if x.startswith("run.dir=")]
        self.run_dir, self.processes = folder / (runs or ["run"])[-1], []
        self._said = Path(tempfile.mkdtemp(dir=folder))
        command = train_command(self.run_dir, *arguments)
        address, environ = f"127.0.0.1:{free_port()}", variables_of(folder) | dict(variables)
        for process in range(num_processes):
            if num_processes > 1:
                environ |= zip(VARIABLES, (address, str(num_processes), str(process)), strict=True)
            if process == num_processes - 1:
                command, environ = [*command, *last_arguments], environ | dict(last_variables)
                folder = last_folder or folder
            self._start(command, cwd=folder, env=environ, start_new_session=start_new_session)

    def _start(self, command, **how):
        # Files: a pipe that nobody reads would hold up a process that says much.
        out, err = self._files(len(self.processes))
        with out.open("w") as out, err.open("w") as err:
            self.processes.append(subprocess.Popen(command, stdout=out, stderr=err, **how))

    def _files(self, process):
        return [self._said / f"{process}.{name}" for name in ("out", "err")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()  # does nothing to one that has ended
            process.wait()

    def codes(self):
        """Waits for the end of all; `outputs` then no longer change."""
        return [process.wait(timeout=SECONDS) for process in self.processes]

    @property
    def outputs(self):
        """What each process has printed, and its errors."""
        files = map(self._files, range(len(self.processes)))
        return [(out.read_text(), err.read_text()) for out, err in files]

    def said(self, process=0):
        """The errors of a process, as one line."""
        return " ".join(self.outputs[process][1].split())

    def wait_for(self, condition):
        """Waits until a condition holds, as long as all processes live."""
        wait_until(condition, *self.processes, said=lambda: self.outputs, pause=0.005)

    def wait_for_step(self, step):
        self.wait_for(lambda: self.num_steps() >= step)

    def wait_for_saved(self, step):
        self.wait_for(lambda: self.last_saved() >= step)

    def num_steps(self):
        """Steps of the last record."""
        measured = records(self.run_dir)
        return measured[-1]["step"] if measured else 0

    def saved(self):
        return saved_steps(self.run_dir)

    def last_saved(self):
        return max(self.saved(), default=0)


def assert_ends(folder, *arguments, num_processes=1, **how):
    """Runs a job to its end in good order."""
    with Job(folder, *arguments, num_processes=num_processes, **how) as job:
        assert job.codes() == [0] * num_processes, job.outputs
    return job


def assert_same_run(job, golden):
    """Ended as if nothing had disturbed it: in every bit of the state, and in what it measured."""
    assert result(job.run_dir, ".") == result(golden.run_dir, ".")
