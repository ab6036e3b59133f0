"""The storage of a run directory: a local folder, or a URL whose files a local folder mirrors.

    storage = storage_at("s3://bucket/run")
    storage.fetch()                             # settings, metrics, logs, the newest checkpoint
    storage.publish(storage.folder / "checkpoints" / "1200")
    storage.upload()                            # other files that have changed: metrics, logs

The machines of a cloud may share no file system. Object storage cannot rename: a checkpoint is
complete if its list of digests is there. The list is uploaded last and removed first. A downloaded
checkpoint is compared with that list, like any other.

Storage has no locks that end with a process. At its start a run writes its name into the file
`lock`. Before it uploads or removes a file, it reads this name, and stops if another name is there.
"""

import atexit
import contextlib
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from jddp.checkpoint.folders import SUMS, Surplus, find_damage, first_line, names_listed
from jddp.ground.errors import ConfigError, FileSystemError
from jddp.ground.files import SameFolder, folder_or_url, is_url

_COMPLETE = re.compile(rf"([\w-]+/(0|[1-9][0-9]*))/{SUMS}", re.ASCII)
_LOCK = "lock"
_IN_A_CHECKPOINT = re.compile(r"[\w-]+/[0-9]+(\.\w+)*/.+", re.ASCII)


class Storage:
    """A folder of this machine or of a shared file system: nothing is copied.

    Args:
      path: Path of the folder.

    Attributes:
      name: The path or URL, as messages show it.
      folder: The local folder, with fetched files and files to upload.
      pinned: The same folder, as long as its path leads to it.
      is_shared: Whether all processes of a job read and write the same folder.
    """

    is_shared = True

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path).absolute()
        self.pinned = SameFolder(self.folder)
        here = Path.cwd()
        inside = self.folder.is_relative_to(here)
        self.name: str | Path = self.folder.relative_to(here) if inside else self.folder

    def check(self) -> None:
        """Checks that the place can be read; raises a FileSystemError if it cannot."""

    def claim(self) -> None:
        """Claims the place: a run that has claimed it before stores nothing there from now on."""

    def fetch(self, *, every: bool = False) -> None:
        """Copies settings, metrics, logs and the newest checkpoint, or all, into the folder."""

    def publish(self, checkpoint: Path) -> None:
        """Stores a finished checkpoint of the folder, replacing one of the same step."""

    def remove_surplus(self, above: str, saved: int, surplus: Surplus) -> None:
        """Removes stored checkpoints that are no longer kept once a step has been saved."""

    def upload(self) -> None:
        """Stores changed files of the folder that are not part of a checkpoint."""


class Remote(Storage):
    """Files at a URL, and a local folder that is removed when this process ends.

    Args:
      url: URL of a directory, of any kind that fsspec knows.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
    """

    is_shared = False

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url}: {error}. pip install 'jddp[s3]' or 'jddp[gs]', or give a folder."
            ) from error
        super().__init__(tempfile.mkdtemp(prefix="jddp-run-"))
        self.name = url
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self._claim = ""
        self._known: dict[Path, tuple[int, int]] = {}  # Versions that the URL has already.

    def check(self) -> None:
        """Checks that the URL can be read."""
        with self._explained("read"):
            self._names("")

    def claim(self) -> None:
        """Claims the URL: a run that has claimed it before changes nothing there from now on."""
        self._claim = f"process {os.getpid()} on {socket.gethostname()}\n{secrets.token_hex(8)}\n"
        with self._explained("written"):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(f"{self._root}/{_LOCK}", self._claim.encode())

    def fetch(self, *, every: bool = False) -> None:
        """Downloads settings, metrics, logs and the newest undamaged checkpoint, or all."""
        with self._explained("read"):
            names = self._names("")
            for name in names:
                if ("/" not in name or name.startswith("logs/")) and name != _LOCK:
                    self._get(name)
                    self._known[self.folder / name] = _version(self.folder / name)
            complete = filter(None, map(_COMPLETE.fullmatch, names))
            for _, checkpoint in sorted((-int(match[2]), match[1]) for match in complete):
                if every or checkpoint.startswith("checkpoints/"):
                    for name in [name for name in names if name.startswith(f"{checkpoint}/")]:
                        self._get(name)
                    if not every and find_damage(self.folder / checkpoint) is None:
                        return

    def publish(self, checkpoint: Path) -> None:
        """Uploads a finished checkpoint, replacing one of the same step."""
        self.upload()
        with self._explained("written"):
            self._remove(f"{checkpoint.parent.name}/{checkpoint.name}")
            for name in names_listed(checkpoint):
                self._put(checkpoint / name)

    def remove_surplus(self, above: str, saved: int, surplus: Surplus) -> None:
        """Removes checkpoints at the URL that are no longer kept once a step has been saved."""
        with self._explained("cleared of old checkpoints"):
            complete = filter(None, map(_COMPLETE.fullmatch, self._names(above)))
            for step in surplus([int(match[2]) for match in complete], saved):
                self._remove(f"{above}/{step}")

    def upload(self) -> None:
        """Uploads changed files that are not part of a checkpoint."""
        with self._explained("written"):
            for path in self.folder.rglob("*"):
                name = path.relative_to(self.folder).as_posix()
                if name == _LOCK or _IN_A_CHECKPOINT.fullmatch(name) or not path.is_file():
                    continue
                version = _version(path)
                if self._known.get(path) != version:
                    self._put(path)
                    self._known[path] = version

    def _names(self, below: str) -> list[str]:
        """The names of all files below a directory, relative to the run directory."""
        self._files.invalidate_cache()
        paths = self._files.find(f"{self._root}/{below}".rstrip("/"))
        names = [str(path)[len(self._root) :].lstrip("/") for path in paths]
        return [name for name in names if name and ".." not in PurePosixPath(name).parts]

    def _get(self, name: str) -> None:
        (self.folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files.get_file(f"{self._root}/{name}", str(self.folder / name))

    def _put(self, path: Path) -> None:
        self._check_claim()
        target = f"{self._root}/{path.relative_to(self.folder).as_posix()}"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)

    def _remove(self, checkpoint: str) -> None:
        for name in sorted(self._names(checkpoint), key=lambda name: not name.endswith(f"/{SUMS}")):
            self._check_claim()
            self._files.rm_file(f"{self._root}/{name}")

    def _check_claim(self) -> None:
        """Raises an OSError if another run has claimed the URL since this one did."""
        found = self._claim
        with contextlib.suppress(FileNotFoundError):
            found = self._claim and self._files.cat_file(f"{self._root}/{_LOCK}").decode()
        if found != self._claim:
            raise OSError(
                f"{found.partition(chr(10))[0]} has started a run there since, which continues. "
                "For two runs, give each a run.dir of its own"
            )

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # The clients of storage services raise anything.
            raise FileSystemError(f"{self.name} cannot be {done}: {first_line(error)}") from error


def _version(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_mtime_ns, facts.st_size


def storage_at(where: str | Path) -> Storage:
    """Returns the storage at a path or a URL.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
    """
    return Remote(str(where)) if is_url(where) else Storage(where)


def local_copy(path: str | Path) -> Path:
    """Returns a folder as it is; copies the files of a URL to one that is removed at the exit.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
      FileSystemError: If it cannot be read.
    """
    storage = storage_at(folder_or_url(path))
    storage.fetch(every=True)
    return storage.folder
