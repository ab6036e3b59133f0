"""The storage of a run directory: a local folder, or a URL.

storage = storage_at("s3://bucket/run")
storage.fetch()                             # whatever a run needs to resume
...                                         # the run reads and writes storage.folder
storage.upload()
"""

from pathlib import Path
from typing import Protocol, runtime_checkable

from jddp.checkpoint.folders import Surplus
from jddp.checkpoint.remote import Remote
from jddp.config.permissions import folder_or_url, is_url
from jddp.files import SameFolder


@runtime_checkable
class Storage(Protocol):
    """The place of a run directory, and the local folder with its files.

    Attributes:
      name: The path or URL, as messages show it.
      folder: The local folder, with fetched files and files to upload.
      pinned: The same folder, as long as its path leads to it.
      is_shared: Whether all processes of a job read and write the same folder.
    """

    name: str | Path
    folder: Path
    pinned: SameFolder
    is_shared: bool

    def check(self) -> None:
        """Checks that the place can be read; raises a FileSystemError if it cannot."""

    def claim(self) -> None:
        """From here on a run that has claimed the place before stores nothing there."""

    def fetch(self, *, every: bool = False) -> None:
        """Copies settings, metrics, logs and the newest checkpoint, or all, into the folder."""

    def publish(self, checkpoint: Path) -> None:
        """Stores a finished checkpoint of the folder, replacing one of the same step."""

    def remove_surplus(self, above: str, saved: int, surplus: Surplus) -> None:
        """Removes stored checkpoints that are no longer kept once a step has been saved."""

    def upload(self) -> None:
        """Stores changed files of the folder that are not part of a checkpoint."""


class LocalFolder:
    """A folder of this machine or of a shared file system: nothing is copied.

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
        """Does nothing: the folder may not exist yet."""

    def claim(self) -> None:
        """Does nothing: the lock of the folder itself is enough."""

    def fetch(self, *, every: bool = False) -> None:
        """Does nothing: all files are there."""

    def publish(self, checkpoint: Path) -> None:
        """Does nothing: the checkpoint is there."""

    def remove_surplus(self, above: str, saved: int, surplus: Surplus) -> None:
        """Does nothing: the writer has removed them."""

    def upload(self) -> None:
        """Does nothing: all files are there."""


def storage_at(where: str | Path) -> Storage:
    """Returns the storage at a path or a URL.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
    """
    return Remote(str(where)) if is_url(where) else LocalFolder(where)


def local_copy(path: str | Path) -> Path:
    """Returns the folder; for a URL, a copy with all checkpoints that lasts while the process does.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
      FileSystemError: If it cannot be read.
    """
    storage = storage_at(folder_or_url(path))
    storage.fetch(every=True)
    return storage.folder
