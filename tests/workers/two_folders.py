"""A process of a job that saves one step in two folders at once: python -m workers.two_folders DIR

Process 1 cannot write into the first folder, and votes on the second one before it says so; process
0 votes on the first one before the second.
"""

import errno
import sys
import threading
from pathlib import Path

import jax
import optax
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp import distributed
from jddp.checkpoint import checkpoints
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.ground.errors import FileSystemError

STEP = 4
FIRST, SECOND = NAMES = ("checkpoints", "best")

has_voted = threading.Event()
ends, votes, refuses = CheckpointFolder._finish, checkpoints.gather, checkpoints.make_folder


def vote(*arguments, **options):
    has_voted.set()
    return votes(*arguments, **options)


def finish(self, *arguments):
    is_late = self._directory.name == (SECOND, FIRST)[jax.process_index()]
    assert not is_late or has_voted.wait(60)
    return ends(self, *arguments)


def refuse_first(folder, **options):
    if jax.process_index() == 1 and folder.name == "state" and FIRST in folder.parts:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))
    refuses(folder, **options)


if __name__ == "__main__":
    distributed.initialize(distributed.resolve_identity())
    CheckpointFolder._finish, checkpoints.gather = finish, vote
    checkpoints.make_folder = refuse_first
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)
    state = ddp.init(0, make_batch(8))
    opened = [CheckpointFolder(Path(sys.argv[1]) / name, keep=1) for name in NAMES]
    for folder in opened:
        folder.save(STEP, state, {})
    for name, folder in zip(NAMES, opened, strict=True):
        try:
            folder.close()
            print(name, "is saved")
        except FileSystemError as error:
            print(name, "is refused:", error)
