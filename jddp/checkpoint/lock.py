"""A lock file with one holder at a time, until it releases the file or ends in any way.

    with held(run_dir / "lock") as name:     # InUse if another holder has it, also in this process
        ...                                  # meanwhile `name` is in the file

The lock is an `flock`, which belongs to an open file and not to the process, as a lock of POSIX
does: such a lock would end as soon as the process closes any descriptor of the file, as a copy or
an upload of the directory does, and two threads of one process would share it. Network file systems
of Linux hold it on all hosts. If a file system has no locks, there is none, with a warning. A
forked child does not keep it.
"""

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jddp.distributed.signals import in_forked_children
from jddp.ground.errors import words_of
from jddp.ground.files import opener

log = logging.getLogger("jddp")


class InUse(Exception):
    """Another holder has the file; the text is its name."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[str]:
    """While open, this process holds a file, which is made if it is missing.

    Yields:
      The holder's name, which is in the file; empty if it could not be written.

    Raises:
      InUse: If another holder has it.
      OSError: If it cannot be opened, or is a link.
    """
    # A child shares the descriptor, and would keep the lock after the end of its parent.
    with _opened(path) as file, in_forked_children(file.close):
        if not _is_locked(file):
            raise InUse(_name_of_holder(file))
        try:
            yield _write_name(file)
        finally:
            if not file.closed:  # as it is in a forked child
                with contextlib.suppress(OSError):
                    file.truncate(0)


def holder_of(path: Path) -> str:
    """The name of the process that holds a file, which is only read; "" if it is free or missing.

    Raises:
      OSError: If it cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
        return "" if _is_locked(file, fcntl.LOCK_SH) else _name_of_holder(file)
    return ""


def _opened(path: Path) -> IO[bytes]:
    # The target of a link would be emptied.
    return open(path, "a+b", buffering=0, opener=lambda p, flags: opener(p, flags | os.O_NOFOLLOW))


def _is_locked(file: IO[bytes], kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file; returns False if another holder has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s cannot be locked: %s.", file.name, words_of(error))
    return True


def _write_name(file: IO[bytes]) -> str:
    name = f"{_own_name()}\n"
    with contextlib.suppress(OSError):  # A full disk has locks, and no room for a name.
        file.truncate(0)
        file.write(name.encode())
        return name
    return ""


def _name_of_holder(file: IO[bytes]) -> str:
    file.seek(0)
    name = file.read(1000).decode(errors="replace").strip()
    return "another run of this process" if name == _own_name() else name or "another process"


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
