"""Start `python -m jddp.train` as the processes of a job, wait for what they do, disturb them.

    with Job(folder, "run.dir=run", num_processes=2) as job:
        job.wait_for(lambda: job.num_steps() >= 20)
        job.processes[1].send_signal(signal.SIGTERM)
        assert job.codes() == [75, 75]

Nothing here sleeps for luck: whatever is waited for is a condition, and a job that does not meet it
in time is killed, and what it said is told.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runs import environment, free_port, records

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
train: {num_steps: 2000, log_every_steps: 10}
data: {target: "mine:points", global_batch_size: 8}
model: {target: "mine:Line"}
loss: {name: mean_squared_error}
optimizer: {name: adam, learning_rate: 0.001}
ddp: {ema_decay: 0.99}
mesh: {num_devices: 2}
checkpoint: {every_steps: 400, keep: 2}
"""


def make_folder(folder, cache):
    """A user's folder, with a module and a config; jobs in it share what others have compiled."""
    folder.mkdir(exist_ok=True)
    (folder / "cache").write_text(str(cache))
    (folder / "mine.py").write_text(MINE)
    (folder / "job.yaml").write_text(CONFIG)
    return folder


class Job:
    """The processes of one job, which are ended with the block.

    Args:
      folder: Of `make_folder`; where the processes run.
      arguments: For `jddp.train`; `run.dir` is `run` unless one of them says otherwise.
      num_processes: Of the job.
      variables: Of the environment.
      last_arguments: More of them, for the last process alone.
      last_variables: The same of the environment.
      start_new_session: Whether the processes are a group of their own, as in a terminal.
    """

    def __init__(
        self,
        folder,
        *arguments,
        num_processes=1,
        variables=(),
        last_arguments=(),
        last_variables=(),
        start_new_session=False,
    ):
        self.run_dir = folder / "run"
        for argument in arguments:
            if argument.startswith("run.dir="):
                self.run_dir = folder / argument.removeprefix("run.dir=")
        kept = environment(XDG_CACHE_HOME=(folder / "cache").read_text()) | dict(variables)
        arguments = ["--config", "job.yaml", f"run.dir={self.run_dir}", *arguments]
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "jddp.train", *arguments]
        self.processes, self._said = [], Path(tempfile.mkdtemp(dir=folder))
        for process in range(num_processes):
            values = (address, str(num_processes), str(process))
            job = dict(zip(names, values, strict=True)) if num_processes > 1 else {}
            is_last = process == num_processes - 1
            # Files: a pipe that nobody reads would hold up a process that says much.
            said = [self._said / f"{process}.{name}" for name in ("out", "err")]
            with said[0].open("w") as out, said[1].open("w") as err:
                self.processes.append(
                    subprocess.Popen(
                        [*command, *(last_arguments if is_last else ())],
                        cwd=folder,
                        env=kept | job | dict(last_variables if is_last else ()),
                        stdout=out,
                        stderr=err,
                        start_new_session=start_new_session,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()  # does nothing to one that has ended
            process.wait()

    def codes(self, seconds=SECONDS):
        """Waits for the end of all; what they said is then in `outputs`."""
        for process in self.processes:
            process.wait(timeout=seconds)
        self.outputs = self._outputs()
        return [process.returncode for process in self.processes]

    def _outputs(self):
        names = ("out", "err")
        numbers = range(len(self.processes))
        return [tuple((self._said / f"{i}.{x}").read_text() for x in names) for i in numbers]

    def wait_for(self, condition, seconds=SECONDS):
        """Waits until a condition holds, as long as all processes live."""
        until = time.monotonic() + seconds
        while not condition():
            ended = [process.poll() for process in self.processes]
            assert set(ended) == {None}, (ended, self._outputs())
            assert time.monotonic() < until, "the condition was not met in time"
            time.sleep(0.005)

    def records(self):
        """What has been measured, without what depends on the machine's mood."""
        return records(self.run_dir)

    def num_steps(self):
        """Steps of the last record."""
        measured = self.records()
        return measured[-1]["step"] if measured else 0

    def saved(self):
        """Steps of the finished checkpoints."""
        folder = self.run_dir / "checkpoints"
        there = folder.iterdir() if folder.exists() else ()
        return sorted(int(path.name) for path in there if path.name.isdecimal())

    def digests(self):
        """Of every array of the last checkpoint: equal if all bits are."""
        path = self.run_dir / "checkpoints" / str(self.saved()[-1])
        return json.loads((path / "arrays.json").read_text())


def assert_same_run(job, golden):
    """Ended as if nothing had disturbed it: in every bit of the state, and in what it measured."""
    assert job.saved()[-1] == golden.saved()[-1]
    assert job.digests() == golden.digests()
    assert job.records() == golden.records()
