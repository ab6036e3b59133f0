"""The lock of a run directory at a URL: a file that its holder keeps renewing.

    with Lease(files, "bucket/run/lock", "s3://bucket/run") as lease:
        ...                                     # another process that asks for it is refused
        lease.check()                           # raises if another has taken it all the same

Storage has no locks that end with a process, but it has files that only one process can make
(`open(..., "xb")`). A process that finds the file waits: if the file changes, the process is
refused. A file that has not changed for `LEASE_SECONDS` belongs to a process that was killed, and
is taken over. A holder that was stopped or cut off for that long may find that it has lost the
lease, and writes no more.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from typing import Any

from jddp.errors import ConfigError

BEAT_SECONDS, LEASE_SECONDS = 3.0, 15.0


class Lease:
    """Holds the file at a path of a file system of fsspec, while it is open.

    Args:
      files: The file system.
      path: Path of the file.
      url: URL of the run directory, for messages.
    """

    def __init__(self, files: Any, path: str, url: str) -> None:
        self._files = files
        self._path = path
        self._url = url
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._mine = f"{holder}\n{secrets.token_hex(8)}\n"
        self._is_over = threading.Event()
        self._taken_by = ""
        self._thread = threading.Thread(target=self._renew, name="jddp-lease", daemon=True)

    def check(self) -> None:
        """Raises an OSError if another process has taken the lease."""
        if self._taken_by:
            raise OSError(f"{self._taken_by} has taken over: this process did not renew its lease")

    def __enter__(self) -> "Lease":
        """Takes the lease, and renews it in the background.

        Raises:
          ConfigError: If another process holds it.
        """
        seen = ""
        since = 0.0
        while not self._is_made():
            before = seen
            seen = self._read()
            now = time.monotonic()
            if before and seen and seen != before:
                in_use = f"run.dir {self._url} is in use by {_holder(seen)}"
                raise ConfigError(f"{in_use}. Wait until it ends, or choose another run.dir.")
            since = since if seen == before else now
            if seen and now - since > LEASE_SECONDS:
                self._files.rm_file(self._path)
            time.sleep(BEAT_SECONDS / 10)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Releases the lease, unless another process has taken it."""
        self._is_over.set()
        self._thread.join()
        with contextlib.suppress(Exception):
            if self._read().startswith(self._mine):
                self._files.rm_file(self._path)

    def _is_made(self) -> bool:
        with contextlib.suppress(FileExistsError), self._files.open(self._path, "xb") as file:
            file.write(self._mine.encode())
            return True
        return False

    def _read(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return str(self._files.cat_file(self._path).decode())
        return ""

    def _renew(self) -> None:
        while not (self._is_over.wait(BEAT_SECONDS) or self._taken_by):
            with contextlib.suppress(Exception):  # of a connection that may come back
                there = self._read()
                if there and not there.startswith(self._mine):
                    self._taken_by = _holder(there)
                else:
                    renewed = f"{self._mine}{time.monotonic()}"
                    self._files.pipe_file(self._path, renewed.encode())


def _holder(text: str) -> str:
    return text.partition("\n")[0] or "another process"
