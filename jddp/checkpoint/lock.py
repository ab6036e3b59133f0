"""A lock file with one holder at a time, until it releases the file or ends in any way.

    with held(run_dir / "lock") as name:     # InUse if another holder has it, also in this process
        ...                                  # meanwhile `name` is in the file

The lock belongs to an open file description (`F_OFD_SETLK` of Linux), not to the process as with
`fcntl.lockf`. A lock of a process would end as soon as the process closes any descriptor of the
file, as a copy or an upload of the directory does, and two threads of one process would share it.
If the system or the file system lacks these locks, the lock is `flock`, which behaves alike; if it
lacks both, there is no lock, with a warning. A forked child does not keep it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jddp.distributed.signals import in_forked_children
from jddp.errors import words_of
from jddp.files import opener

log = logging.getLogger("jddp")

_FLOCK = "hhqqi0q"
_BUSY = {errno.EAGAIN, errno.EACCES}
# Answers of a system or a file system that has no such lock.
_LACKING = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


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
        return _name_of_holder(file) if _is_held(file) else ""
    return ""


def _opened(path: Path) -> IO[bytes]:
    # The target of a link would be emptied.
    return open(path, "a+b", buffering=0, opener=lambda p, flags: opener(p, flags | os.O_NOFOLLOW))


def _is_locked(file: IO[bytes]) -> bool:
    """Locks an open file; returns False if another holder has it."""
    for lock in (_lock_description, _flock):
        try:
            lock(file)
            return True
        except OSError as error:
            if error.errno in _BUSY:
                return False
            failure = error
            if error.errno not in _LACKING:
                break
    log.warning("%s cannot be locked: %s.", file.name, words_of(failure))
    return True


def _lock_description(file: IO[bytes]) -> None:
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _whole(fcntl.F_WRLCK))


def _whole(kind: int) -> bytes:
    """A lock of a whole file, as a struct flock."""
    # Type, whence, start, length (0: to the end), and no process.
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _is_held(file: IO[bytes]) -> bool:
    """Whether another one holds a file; where that cannot be asked, whether a name is in it."""
    try:
        asked = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _whole(fcntl.F_RDLCK))
    except (OSError, AttributeError):
        return bool(file.read(1))
    return struct.unpack(_FLOCK, asked)[0] != fcntl.F_UNLCK


def _flock(file: IO[bytes]) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
