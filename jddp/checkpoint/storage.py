"""Where a run directory is kept: in a local folder, or at a URL.

storage = storage_at("s3://bucket/run")
storage.fetch()                             # whatever a run needs to resume
...                                         # which reads and writes storage.folder
storage.upload()
"""

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from jddp.checkpoint.folders import Surplus
from jddp.checkpoint.remote import Remote
from jddp.config.permissions import folder_or_url, is_url
from jddp.files import SameFolder


@runtime_checkable
class Storage(Protocol):
    """The place of a run directory, and the folder of this machine in which its files are.

    Attributes:
      name: The path or URL, as messages have it.
      folder: The folder, with what was fetched and what is to be uploaded.
      pinned: The same folder, as long as its path leads to it.
      is_shared: Whether all processes of a job read and write the same folder.
    """

    name: str | Path
    folder: Path
    pinned: SameFolder
    is_shared: bool

    def check(self) -> None:
        """Checks that the place can be read; raises a FileSystemError if it cannot."""

    def held(self) -> AbstractContextManager[None]:
        """While open, a process of another machine that asks for it is refused."""

    def fetch(self, *, every: bool = False) -> None:
        """Gets settings, metrics, logs and the newest checkpoint, or every one, into the folder."""

    def publish(self, checkpoint: Path) -> None:
        """Keeps a finished checkpoint of the folder, in place of one of its step."""

    def remove_surplus(self, above: str, saved: int, surplus: Surplus) -> None:
        """Removes checkpoints from the place that are not to be kept after one was saved."""

    def upload(self) -> None:
        """Keeps files of the folder that have changed and are of no checkpoint."""


class LocalFolder:
    """A folder of this machine, or of a file system that machines share: nothing is copied.

    Args:
      path: Path of the folder.
    """

    is_shared = True

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path).absolute()
        self.pinned = SameFolder(self.folder)
        here = Path.cwd()
        inside = self.folder.is_relative_to(here)
        self.name: str | Path = self.folder.relative_to(here) if inside else self.folder

    def check(self) -> None:
        """Does nothing: the folder may be made yet."""

    def held(self) -> AbstractContextManager[None]:
        """Does nothing: the lock of the folder itself is enough."""
        return contextlib.nullcontext()

    def fetch(self, *, every: bool = False) -> None:
        """Does nothing: all is there."""

    def publish(self, checkpoint: Path) -> None:
        """Does nothing: it is there."""

    def remove_surplus(self, above: str, saved: int, surplus: Surplus) -> None:
        """Does nothing: who saves removes them."""

    def upload(self) -> None:
        """Does nothing: all is there."""


def storage_at(where: str | Path) -> Storage:
    """Returns the storage at a path or a URL.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
    """
    return Remote(str(where)) if is_url(where) else LocalFolder(where)


def local_copy(path: str | Path) -> Path:
    """Returns the folder; of a URL a copy with all its checkpoints, until this process ends.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
      FileSystemError: If it cannot be read.
    """
    storage = storage_at(folder_or_url(path))
    storage.fetch(every=True)
    return storage.folder
