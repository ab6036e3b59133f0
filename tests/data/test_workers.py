"""Processes that read training batches: the same batches, and no hang when one of them dies."""

import contextlib
import itertools
import os
import signal
import sys

import numpy as np
import pytest
from runs import run_python
from states import equal

from jddp.data import ArrayExamples, TrainBatches, WorkerBatches
from jddp.data.sources.arrays import image_examples
from jddp.data.transforms import CropAndFlip
from jddp.ground.errors import ConfigError, DataError
from jddp.ground.typing import TRANSFORM

pytestmark = pytest.mark.processes


class Watched(ArrayExamples):
    """Examples that say who read them, of which one cannot be read, or kills who reads it."""

    bad = deadly = None

    def take(self, indices):
        if self.deadly is not None and self.deadly in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.bad is not None and self.bad in indices:
            raise ZeroDivisionError(f"example {self.bad} is bad")
        return super().take(indices) | {"pid": np.full(len(indices), os.getpid())}


def batches(num_examples=40, *, bad=None, deadly=None, **options):
    examples = Watched({"x": np.arange(num_examples)})
    examples.bad, examples.deadly = bad, deadly
    return TrainBatches(examples, global_batch_size=4, seed=0, **options)


@pytest.fixture
def in_workers():
    """Makes batches read by two processes, which end with the test."""
    with contextlib.ExitStack() as made:
        yield lambda *args, **options: made.enter_context(
            contextlib.closing(WorkerBatches(batches(*args, **options), num_workers=2))
        )


@pytest.mark.parametrize("on_device", [False, True])
def test_processes_send_images_as_bytes_and_the_transforms_of_one_process(on_device):
    images = np.random.default_rng(0).integers(0, 256, (24, 6, 6, 3), dtype=np.uint8)
    examples = image_examples(images, np.arange(24), mean=0.5, std=0.25)
    plan = {"global_batch_size": 4, "seed": 0, "num_epochs": 1, "on_device": on_device}
    plan |= {"transforms": [CropAndFlip()]}
    with contextlib.closing(WorkerBatches(TrainBatches(examples, **plan), num_workers=2)) as two:
        for want, got in zip(TrainBatches(examples, **plan), two, strict=True):
            assert got["image"].dtype == (np.uint8 if on_device else np.float32)
            assert got.pop(TRANSFORM, None) == want.pop(TRANSFORM, None)
            equal(got, want)


def test_two_processes_read_what_one_does_and_resume_where_the_loop_stands(in_workers):
    one, two = batches(num_epochs=1.05), in_workers(num_epochs=1.05)
    assert two.is_padded
    np.testing.assert_array_equal(two.batch(8)["x"], one.batch(8)["x"])
    readers, state = set(), None
    for number, (want, got) in enumerate(zip(one, two, strict=True)):
        equal((got["x"], got["mask"]), (want["x"], want["mask"]))
        readers |= set(got["pid"])
        assert two.get_state() == one.get_state()
        state = one.get_state() if number == 6 else state
    assert len(readers - {os.getpid()}) == 2
    one.set_state(state)
    two.set_state(state)
    rest = [[batch["x"].tolist() for batch in batches] for batches in (one, two)]
    assert rest[0] == rest[1]
    assert len(rest[0]) == 4
    two.set_state({"position": 38})  # as behind a partial batch
    assert [batch.keys() for batch in two] == [{"x", "pid"}]  # 42 - 38 fill a batch


def test_an_error_in_a_process_arrives_and_one_that_dies_ends_the_reading(in_workers):
    with pytest.raises(ZeroDivisionError, match="example 30 is bad"):
        list(in_workers(bad=30, num_epochs=1))
    # While it reads: at some other moments it has a lock of grain's, which then waits for ever.
    with pytest.raises(DataError, match="a worker that reads data has died .*num_workers"):
        list(itertools.islice(in_workers(deadly=30), 100))


def test_without_grain_there_are_no_workers(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ConfigError, match=r"needs grain, .*pip install 'jddp\[data\]'"):
        WorkerBatches(batches(), num_workers=1)


QUIET = """
import itertools
import sys
import numpy as np
from jddp.data import ArrayExamples, TrainBatches, WorkerBatches

if __name__ == "__main__":
    examples = ArrayExamples({"x": np.zeros((100, 20_000), np.float32)})
    batches = TrainBatches(examples, global_batch_size=4, seed=0, num_epochs=eval(sys.argv[1]))
    workers = WorkerBatches(batches, num_workers=2)
    print(sum(len(batch["x"]) for batch in itertools.islice(workers, 5)))
    workers.close()
"""


@pytest.mark.parametrize("num_epochs", [0.2, None])
def test_workers_end_without_a_word(tmp_path, num_epochs):
    (tmp_path / "quiet.py").write_text(QUIET)
    done = run_python(tmp_path / "quiet.py", num_epochs)
    assert (done.returncode, done.stdout, done.stderr) == (0, "20\n", "")
