"""A run directory at a URL: its files are in a local folder, and are copied to the URL.

    remote = Remote("s3://bucket/run")
    remote.fetch()                              # settings, metrics, logs, the newest checkpoint
    remote.publish(remote.folder / "checkpoints" / "1200")
    remote.upload()                             # whatever else has changed: metrics, logs

The machines of a cloud may share no file system. Object storage cannot rename, so a checkpoint is
complete if its list of digests is there, which is uploaded last and removed first. A downloaded
checkpoint is compared with that list, like any other.

Storage has no locks that end with a process. A run that starts writes its name into the file `lock`
there. Before each file that it uploads or removes it reads this name, and stops if it is another.
"""

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from jddp.checkpoint.checksums import NAME as SUMS
from jddp.checkpoint.checksums import find_damage, names_listed
from jddp.checkpoint.folders import Surplus, first_line
from jddp.errors import ConfigError, FileSystemError
from jddp.files import SameFolder

_COMPLETE = re.compile(rf"([\w-]+/(0|[1-9][0-9]*))/{SUMS}", re.ASCII)
_LOCK = "lock"
_IN_A_CHECKPOINT = re.compile(r"[\w-]+/[0-9]+(\.\w+)*/.+", re.ASCII)


class Remote:
    """Files at a URL, and the local folder of this process, with the files that it has copied.

    Args:
      url: URL of a directory, of any kind that fsspec knows.

    Attributes:
      name: The URL.
      folder: The folder, which is removed when the process ends.
      pinned: The same folder, as long as its path leads to it.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
    """

    is_shared = False

    def __init__(self, url: str) -> None:
        self.name: str | Path = url
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url}: {error}. pip install 'jddp[s3]' or 'jddp[gs]', or give a folder."
            ) from error
        self.folder = _own_folder()
        self.pinned = SameFolder(self.folder)
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self._claim = ""
        self._known: dict[Path, tuple[int, int]] = {}  # versions that the URL has too

    def check(self) -> None:
        """Checks that the URL can be read.

        Raises:
          FileSystemError: If it cannot.
        """
        with self._explained("read"):
            self._names("")

    def claim(self) -> None:
        """From here on a run that has claimed the URL before uploads and removes nothing there.

        Raises:
          FileSystemError: If the URL cannot be written.
        """
        self._claim = f"process {os.getpid()} on {socket.gethostname()}\n{secrets.token_hex(8)}\n"
        with self._explained("written"):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(f"{self._root}/{_LOCK}", self._claim.encode())

    def fetch(self, *, every: bool = False) -> None:
        """Downloads settings, metrics, logs and the newest undamaged checkpoint.

        Args:
          every: Whether to download all checkpoints.

        Raises:
          FileSystemError: If the URL cannot be read.
        """
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
        """Uploads a finished checkpoint, replacing one of the same step.

        Args:
          checkpoint: Folder of the checkpoint, in `folder`.

        Raises:
          FileSystemError: If the URL cannot be written.
        """
        self.upload()
        above = checkpoint.parent.name
        with self._explained("written"):
            self._remove(f"{above}/{checkpoint.name}")
            for name in names_listed(checkpoint):
                self._put(checkpoint / name)

    def remove_surplus(self, above: str, saved: int, surplus: Surplus) -> None:
        """Removes checkpoints at the URL.

        Args:
          above: Name of the folder of checkpoints.
          saved: Step that was just saved.
          surplus: Function from the steps of all checkpoints, and the step just saved, to the steps
            to remove.

        Raises:
          FileSystemError: If one cannot be removed.
        """
        with self._explained("cleared of old checkpoints"):
            complete = filter(None, map(_COMPLETE.fullmatch, self._names(above)))
            for step in surplus([int(match[2]) for match in complete], saved):
                self._remove(f"{above}/{step}")

    def upload(self) -> None:
        """Uploads changed files that are not part of a checkpoint.

        Raises:
          FileSystemError: If the URL cannot be written.
        """
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
        except ConfigError:
            raise
        except Exception as error:  # The clients of storage services raise anything.
            raise FileSystemError(f"{self.name} cannot be {done}: {first_line(error)}") from error


def _own_folder() -> Path:
    """Makes a folder that stays locked while this process lives; removes those of killed processes.

    Its name contains the host's name: on a network file system, locks may hold on one host only.
    """
    name = f"jddp-run-{socket.gethostname()}-"
    for old in Path(tempfile.gettempdir()).glob(f"{name}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            descriptor = os.open(old, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unless it is in use
            shutil.rmtree(old)
    folder = Path(tempfile.mkdtemp(prefix="jddp-new-"))
    with contextlib.suppress(OSError):  # of file systems without locks, where no folder is removed
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    return folder.rename(folder.with_name(folder.name.replace("jddp-new-", name)))


def _version(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_mtime_ns, facts.st_size
