"""The directory of a run.

    config.yaml      the resolved config; none for a run that was started from objects
    manifest.json    versions, data and topology at the first start, and at later ones that differ,
                     with the keys that they were allowed to change
    metrics.jsonl    one record per line
    checkpoints/     states to resume from
    report.html      a page on the run, as it was at its end
    logs/            the lines of each process, and the events of the run
    profile/         traces of each process, of the steps that were asked for
    events.*, wandb/ records for TensorBoard, and for Weights & Biases, if they are sinks
    memory           the name of the run's states in memory, while they may be there
    lock             the process that writes here, while it runs

A directory belongs to the config that it was first used with: a rerun with the same one resumes,
a run with another config is refused before a byte is written.

The lock is an `flock`, which belongs to an open file and not to the process, as a lock of POSIX
does: such a lock would end as soon as the process closes any descriptor of the file, as a copy or
an upload of the directory does, and two threads of one process would share it. Network file systems
of Linux hold it on all hosts. If a file system has no locks, there is none, with a warning. A
forked child does not keep it.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jddp.checkpoint.storage import storage_at
from jddp.config.files import dump_values, flatten, read_yaml
from jddp.config.schema import default_of, effect_of
from jddp.distributed.signals import in_forked_children
from jddp.ground.errors import ConfigError, DataError, FileSystemError, file_errors, words_of
from jddp.ground.files import make_folder, opener, refuse_foreign
from jddp.ground.typing import JsonObject, Settings
from jddp.trainer.reports.files import MetricsFile, logging_to

# Keys of one start, not of the run: their changes are not reported.
KEYS_OF_A_START = {"run.dir", "data.dir", "checkpoint.resume", "checkpoint.allow_changed"}
# A schedule without a length has the length of the run: writing that length changes nothing.
LENGTH_KEYS = {f"optimizer.schedule.kwargs.{x}" for x in ("decay_steps", "transition_steps")}
# Files and folders of a run whose names a folder of checkpoints could have.
OWN_NAMES = {"lock", "logs", "memory", "nonfinite", "profile", "wandb"}
MEMORY = "memory"
MISSING = object()
log = logging.getLogger("jddp")


class RunDirectory:
    """Paths of a run, and the check that they belong to it.

    Args:
      where: The directory, which need not exist; or a URL, whose local copy is `path`.
      is_writer: Whether this process writes. All processes check.

    Raises:
      ConfigError: If the packages for such URLs are not installed.
    """

    def __init__(self, where: str | Path, *, is_writer: bool) -> None:
        self.storage = storage_at(where)
        self.path = self.storage.folder
        self.where = self.storage.name
        self.checkpoints = self.path / "checkpoints"
        self.folder = self.storage.pinned
        path = self.path / "metrics.jsonl"
        self.metrics = MetricsFile(path, is_writer=is_writer, folder=self.folder)
        self._config, self._manifest = self.path / "config.yaml", self.path / "manifest.json"
        self._is_writer = is_writer
        self._holder = ""

    @contextlib.contextmanager
    def held(self, config: Settings | None, manifest: JsonObject) -> Iterator[None]:
        """While open, the directory is this run's: made or found to be so, and locked.

        A run that ended before its first step leaves nothing to resume from: another run takes over
        its directory, and reports it. The lock ends with the process, however that ends. Where a
        file system has no locks there is none, nor at a URL, where the last metrics and logs are
        copied to.

        Args:
          config: The resolved config; None if the run was started from objects.
          manifest: Versions, data and topology. `manifest["data"]["sha256"]`, if present, must
            equal the hash of an earlier start, unless `checkpoint.allow_changed` lists "data".

        Raises:
          ConfigError: If the directory holds another run, with the keys that differ, or a process
            writes there.
          DataError: If the data have changed since the run was started.
          FileSystemError: If it cannot be read or written.
        """
        self.check_usable()
        self.storage.fetch()
        with contextlib.ExitStack() as stack:
            with self._explained():
                starts = self._checked_starts(config, manifest)
                if self._is_writer:
                    self.storage.claim()
                    make_folder(self.path, mode=0o700)
                    try:
                        self._holder = stack.enter_context(held(self.path / "lock"))
                    except InUse as holder:
                        raise ConfigError(
                            f"run.dir {self.where} is in use by {holder}. "
                            "Wait until it ends, or choose another run.dir."
                        ) from None
                    self._write(config, starts, manifest)
                if self.path.exists():
                    self.folder.pin()
            self.storage.upload()  # Finds out now if a URL cannot be written.
            try:
                yield
            finally:
                try:
                    self.storage.upload()
                except FileSystemError as error:
                    log.warning("Metrics and logs: %s", error)

    def check_usable(self) -> None:
        """Checks that the directory can be made or written, without doing it.

        Raises:
          FileSystemError: If it cannot, or belongs to another user.
        """
        self.storage.check()
        with self._explained():
            refuse_foreign(self.path, "run.dir")
            above = self.path.absolute().parents
            there = next(path for path in (self.path, *above) if os.path.lexists(path))
            inside = f"{there}/."
            os.stat(inside)  # Raises if it is not a directory.
            if not os.access(inside, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "Permission denied", str(there))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a ValueError: an impossible file name
            reason = words_of(error) if isinstance(error, OSError) else str(error)
            file = f": {name}" if (name := getattr(error, "filename", None)) is not None else ""
            text = f"run.dir {self.where}: {reason}{file}. Choose a folder that can be written."
            raise FileSystemError(text) from error

    def finish(self) -> FileSystemError | None:
        """Writes the remaining records and logs; returns an error if some are lost."""
        self.metrics.close()
        try:
            self.storage.upload()
        except FileSystemError as error:
            return self.metrics.lost or FileSystemError(f"Metrics and logs are lost: {error}")
        return self.metrics.lost

    def check_seen(self) -> None:
        """Checks that all processes of the job see the directory that process 0 holds.

        Raises:
          FileSystemError: If this process does not.
        """
        # These modules import JAX; a command first checks the directory and sets its cache.
        from jddp.checkpoint.checkpoints import SECONDS, wait_until_seen
        from jddp.distributed.coordination import from_first

        holder = from_first("held", self._holder, timeout_seconds=SECONDS)
        # A full disk has no name of the holder, and a URL has no common folder.
        if holder and self.storage.is_shared and not self._is_writer:
            wait_until_seen(self.path / "lock", holder)
            self.folder.pin()

    def memory_token(self) -> str:
        """A name that only this run has, the same on all processes and at each start.

        Raises:
          FileSystemError: If it cannot be read or written.
        """
        from jddp.checkpoint.checkpoints import SECONDS
        from jddp.distributed.coordination import from_first

        path, token = self.path / MEMORY, ""
        if self._is_writer:
            with self._explained():
                token = path.read_text() if path.exists() else secrets.token_hex(8)
                self.folder.replace(MEMORY, [token.encode()])
        return from_first("memory", token, timeout_seconds=SECONDS)

    def logging(self, process_index: int) -> contextlib.AbstractContextManager[None]:
        """While open, the lines of this process go into its log file.

        Raises:
          FileSystemError: If it cannot be opened.
        """
        path = self.path / "logs" / f"process_{process_index}.log"
        with file_errors(f"{path}: cannot be written"):
            self.folder.check()
        events = self.path / "logs" / "events.jsonl" if process_index == 0 else None
        return logging_to(path, events)

    def stacks(self, process_index: int) -> Path:
        """The file for the stacks of a process that hangs."""
        return self.path / "logs" / f"process_{process_index}.stacks"

    def profile(self, process_index: int) -> Path:
        """The folder for the traces of a process."""
        return self.path / "profile" / f"process_{process_index}"

    def _checked_starts(self, config: Settings | None, manifest: JsonObject) -> list[Settings]:
        """The manifests of all starts; none if the directory is taken over.

        Raises:
          ConfigError: If it holds another run.
          DataError: If the data have changed.
        """
        try:
            first = json.loads(self._manifest.read_bytes()) if self._manifest.exists() else {}
            starts = [*filter(None, [first, *first.pop("later_starts", [])])]
            known = [m["data"]["sha256"].strip() for m in starts if m.get("data", {}).get("sha256")]
        except (ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
            raise FileSystemError(
                f"{self._manifest} is damaged: {error!r}. Restore it, or choose another run.dir."
            ) from error
        data = manifest.get("data", {}).get("sha256")
        is_allowed = "data" in (flatten(config or {}).get("checkpoint.allow_changed") or ())
        try:
            self._refuse_another_run(config)
            if known and data and data not in known and not is_allowed:
                raise DataError(
                    f"run.dir {self.where} was started with other data (sha256 {known[-1][:12]}, "
                    f"now {data[:12]}). Restore the data, choose another run.dir, or set "
                    "checkpoint.allow_changed=[data]."
                )
        except (ConfigError, DataError):
            if self._has_begun():
                raise
            return []
        return starts

    def _refuse_another_run(self, config: Settings | None) -> None:
        before = read_yaml(self._config) if self._config.exists() else None
        other = ""
        if before is None and not self._manifest.exists():
            strangers = [p.name for p in (self.metrics.path, self.checkpoints) if p.exists()]
            other = f"{' and '.join(strangers)} of something else" if strangers else ""
        elif (before is None) != (config is None):
            started = "from objects, by jddp.fit" if before is None else "from a config"
            other = f"a run that was started {started}"
        if other:
            raise ConfigError(f"run.dir {self.where} holds {other}. Choose another run.dir.")
        if before is not None and config is not None and (keys := compare_keys(before, config)[0]):
            raise ConfigError(
                f"run.dir {self.where} holds a run of another config: {'; '.join(keys)}. "
                "Choose another run.dir, or the same config to resume; or continue with these keys "
                "(checkpoint.allow_changed=[key])."
            )

    def _has_begun(self) -> bool:
        """Whether the directory holds results of a finished step, or files that are not jddp's."""
        if not (self._config.exists() or self._manifest.exists()):
            return True
        folders = [x for x in self.path.iterdir() if x.is_dir() and x.name not in ("logs", "wandb")]
        return any(map(os.listdir, folders)) or bool(self.metrics.read())

    def _write(self, config: Settings | None, starts: list[Settings], manifest: JsonObject) -> None:
        if not starts and self._manifest.exists():
            log.warning(
                "run.dir %s is taken over from a run that ended before its first step.", self.where
            )
            self._config.unlink(missing_ok=True)
        if config is not None:
            before = read_yaml(self._config) if self._config.exists() else None
            changed = [] if before is None else compare_keys(before, config)[1]
            if before is None or changed:
                self.folder.replace(self._config.name, [dump_values(config).encode()])
            if flatten(config).get("checkpoint.allow_changed"):
                manifest = {**manifest, "changed": changed}
        manifest = json.loads(json.dumps(manifest))  # Tuples become lists, as in the stored one.
        if manifest not in starts:
            first, *later = *starts, manifest
            values = {**first, "later_starts": later} if later else first
            text = f"{json.dumps(values, indent=2)}\n"
            self.folder.replace(self._manifest.name, [text.encode()])


def compare_keys(before: Settings, now: Settings) -> tuple[list[str], list[str]]:
    """Compares the config of a run with the config it resumes with.

    Returns:
      "key is old there, new here" for every key that may not differ, and "key old -> new" for every
      key that may: free keys and keys in `checkpoint.allow_changed`, without keys of one start.
    """
    refused, changed = list[str](), list[str]()
    allowed = _flat(now).get("checkpoint.allow_changed", [])
    for key, was, becomes in _differing(before, now):
        if not (is_free(key, was, becomes) or key in allowed):
            refused.append(f"{key} is {_show(was)} there, {_show(becomes)} here")
        elif key not in KEYS_OF_A_START:
            changed.append(f"{key} {_show(was)} -> {_show(becomes)}")
    return refused, changed


def changed_keys(before: Settings, now: Settings) -> list[str]:
    """The keys that differ between two configs and can change the numbers of later steps."""
    return [key for key, *values in _differing(before, now) if not is_free(key, *values)]


def _differing(before: Settings, now: Settings) -> Iterator[tuple[str, object, object]]:
    """The keys that differ, with the value before and now."""
    old, new = _flat(before), _flat(now)
    # A run of an earlier version lacks newer keys, and was trained with their defaults.
    old |= {key: default_of(key, MISSING) for key in new.keys() - old.keys()}
    for key, was in old.items():
        if was != (becomes := new.get(key, MISSING)):
            yield key, was, becomes


def _flat(values: Settings) -> JsonObject:
    """Values by dotted keys, without empty sections."""
    return {key: x for key, x in flatten(values).items() if x != {}}


def is_free(key: str, old: object, new: object) -> bool:
    """Whether a key may differ between starts, as it changes finished steps at most by rounding."""
    return effect_of(key, old, new) != "numbers" or (key in LENGTH_KEYS and MISSING in (old, new))


def _show(value: object) -> str:
    if value is MISSING:
        return "absent"
    return "null" if value is None else str(value)


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

    def opened(path: str, flags: int) -> int:
        return opener(path, flags | os.O_NOFOLLOW)  # The target of a link would be emptied.

    # A child shares the descriptor, and would keep the lock after the end of its parent.
    with open(path, "a+b", 0, opener=opened) as file, in_forked_children(file.close):
        if not _is_locked(file):
            raise InUse(_name_of_holder(file))
        name = ""
        with contextlib.suppress(OSError):  # A full disk has locks, and no room for a name.
            file.truncate(0)
            file.write(f"{_own_name()}\n".encode())
            name = f"{_own_name()}\n"
        try:
            yield name
        finally:
            if not file.closed:  # A forked child has closed it.
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


def _is_locked(file: IO[bytes], kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file; returns False if another holder has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s cannot be locked: %s.", file.name, words_of(error))
    return True


def _name_of_holder(file: IO[bytes]) -> str:
    file.seek(0)
    name = file.read(1000).decode(errors="replace").strip()
    return "another run of this process" if name == _own_name() else name or "another process"


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
