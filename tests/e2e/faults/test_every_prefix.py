"""A save that is cut anywhere leaves the last checkpoint, or the one before it."""

import subprocess
import sys

import numpy as np
import pytest
from runs import environment
from workers.save_twice import made

from faults.crashes import Disk, record, write
from jddp.checkpoint.checkpoints import CheckpointFolder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The file operations of a program that saves step 1 and then step 2, and its directory."""
    folder = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, "-m", "workers.save_twice", str(folder / "checkpoints")]
    operations = record(command, folder / "trace", env=environment(), stdout=subprocess.DEVNULL)
    return operations, folder / "checkpoints"


def states_of_the_disk(operations, path):
    """What the disk may hold after each operation of the second save, each state once."""
    disk, seen = Disk(str(path)), set()
    begun = finished = False
    for operation in filter(disk.is_inside, operations):
        begun = begun or operation[:2] == ("mkdir", f"{path}/2.new")
        disk.apply(operation)
        renamed = "2" in disk.root.now
        finished = finished or (renamed and operation[:2] == ("sync", str(path)))
        if not begun:
            continue
        for state in (disk.after_kill(), *disk.after_power_loss()):
            key = (finished, tuple(sorted(state.items(), key=str)))
            if key not in seen:
                seen.add(key)
                yield finished, state
    assert finished


@pytest.mark.slow
def test_a_save_that_is_cut_anywhere_leaves_the_last_checkpoint_or_one_before(recorded, tmp_path):
    want = {step: np.load(recorded[1].parent / f"{step}.npy") for step in (1, 2)}
    _, like = made()
    restored = []
    for number, (is_finished, disk) in enumerate(states_of_the_disk(*recorded)):
        write(disk, tmp_path / str(number))
        checkpoints = CheckpointFolder(tmp_path / str(number), keep=1)
        step, got, beside = checkpoints.restore(like=like)
        assert beside == {"saved": step}
        assert not is_finished or step == 2, f"step 2 was there and is gone: {sorted(disk)}"
        np.testing.assert_array_equal(got.params["Dense_0"]["kernel"], want[step])
        checkpoints.close()
        restored.append(step)
    assert len(restored) > 100
    assert set(restored) == {1, 2}
