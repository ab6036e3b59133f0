"""The newest states of a run in the memory of its hosts, for a restart that reads no disk.

    memory = HostMemory(token, state)                 # every process
    memory.save(step, state, {"position": 10})        # returns once it is written
    saved = memory.newest()                           # for `reader.put_on_devices`; or None
    memory.close()                                    # removes all

Files in /dev/shm, or in the folder that JDDP_MEMORY_DIR names, outlive the processes. Each host has
the parts of the arrays that its devices hold, and copies of parts that only the host before it
holds (`parts`). So a state is complete without any one host:

    jddp-<user>-<token>/<step>.<process>         the parts that a process has written
                        <step>.<process>.json    their places, the arrays, the run data; comes last

Two steps stay. When the devices have digested the state of a new step, every process has asked for
it, and has written the step before: only then the older one is removed.

The digests of all arrays are compared when a state is read. A part that a host lacks comes from
another one, so the job may run on other hosts, or on another number of devices.
"""

import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jddp.checkpoint import parts, reader
from jddp.checkpoint.parts import Bounds
from jddp.distributed.coordination import gather
from jddp.distributed.signals import in_forked_children
from jddp.engine.calls import from_process
from jddp.engine.digest import digests, find_divergence
from jddp.engine.mesh import is_key
from jddp.engine.state import TrainState, by_path
from jddp.ground.errors import FileSystemError, ReplicaMismatchError, words_of
from jddp.ground.files import opener, replace_file
from jddp.ground.typing import JsonObject, Settings, in_mebibytes

VARIABLE = "JDDP_MEMORY_DIR"
SECONDS = 600.0  # Limit for all processes to answer.
LEFT_SECONDS = 600.0  # Age of the files of an ended run that another run of the user removes.
log = logging.getLogger("jddp")
_MACHINE = Path("/proc/sys/kernel/random/boot_id")
_MEMORY = Path("/proc/meminfo")

# The bounds of a part, as JSON has them, its offset in a file, and the name of the file.
_Place = list[Any]
_Parts = dict[Bounds, np.ndarray]


class HostMemory:
    """The states of one run in the memory of its hosts.

    Args:
      token: Name of the run, which no other run has.
      like: State with the shapes and shardings of the states.

    Attributes:
      last: Step that was saved or read last; None if there is none.

    Raises:
      FileSystemError: On all processes, if a host has no such memory, or not enough for two states,
        or if others can read it.
    """

    def __init__(self, token: str, like: TrainState) -> None:
        self._above = Path(os.environ.get(VARIABLE, "/dev/shm"))
        self.folder = self._above / f"jddp-{os.geteuid()}-{token}"
        self.last: int | None = None
        self._open = contextlib.ExitStack()
        weakref.finalize(self, self._open.close)
        host = reason = ""
        try:
            host = self._open_folder()
        except (OSError, FileSystemError) as error:
            reason = str(error)
        hosts = _together("memory/host", host, reason)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
        self.hosts = [numbers[name] for name in hosts]
        # The first process of each host.
        self._firsts = [self.hosts.index(number) for number in numbers.values()]
        self._needed = 2 * parts.bytes_on_host(by_path(like), self.hosts)
        free = min(shutil.disk_usage(self.folder).free, _available_bytes())
        free += sum(path.stat().st_size for path in self.folder.iterdir())
        words = f"{self} take more than the {in_mebibytes(free)} MiB that are free."
        _together("memory/room", "", "" if self._needed <= free else words)

    def _open_folder(self) -> str:
        """Makes the folder if it is missing; returns a name of this host's memory."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        facts = self.folder.lstat()
        is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
        if not is_own or facts.st_mode & 0o077:
            raise FileSystemError(f"{self.folder} can be read by others. Remove it.")
        # An open file of each process shows that the run has not ended.
        lock = self._open.enter_context((self.folder / "lock").open("ab"))
        fcntl.flock(lock, fcntl.LOCK_SH)
        self._open.enter_context(in_forked_children(lock.close))
        for folder in self._above.glob(f"jddp-{os.geteuid()}-*"):
            if folder != self.folder and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
        return f"{_MACHINE.read_text()} {facts.st_dev} {facts.st_ino}"

    def __str__(self) -> str:
        return f"two states of {in_mebibytes(self._needed / 2)} MiB in {self._above}"

    def save(
        self, step: int, state: TrainState, beside: Settings, layouts: TrainState | None = None
    ) -> float:
        """Writes a state, which replaces the one before the last; all processes call it.

        Args:
          step: Number of finished optimizer steps.
          state: The training state.
          beside: The run data, as JSON.
          layouts: Layouts of its leaves; None if all are replicated.

        Returns:
          Seconds for copying and writing, once the devices had computed the state. If it cannot be
          written, a warning is logged, and the state before it stays.

        Raises:
          ReplicaMismatchError: If replicas differ.
        """
        arrays = by_path(state)
        found = digests(arrays)
        if (divergence := find_divergence(found, arrays)) is not None:
            raise ReplicaMismatchError(f"Step {step} is not kept in memory: {divergence}.")
        began = time.monotonic()
        described = reader.describe_arrays(arrays, found, reader.layouts_of(state, layouts))
        numbers = {n: jax.random.key_data(x) if is_key(x) else x for n, x in arrays.items()}
        about: JsonObject = {"described": described, "beside": beside, "parts": {}}
        about["shapes"] = {name: x.shape for name, x in numbers.items()}
        path = self.folder / f"{step}.{jax.process_index()}"
        try:
            is_first = jax.process_index() in self._firsts
            # In this order a list goes before its file.
            for older in sorted(self.folder.glob("*.*"), reverse=True) if is_first else ():
                # Another process of this host may have begun to write this step.
                if older.name.partition(".")[0] not in {str(self.last), str(step)}:
                    older.unlink(missing_ok=True)
            with open(path, "wb", opener=opener) as file:
                for name, bounds, data in parts.parts_to_write(numbers, self.hosts):
                    about["parts"].setdefault(name, []).append((bounds, file.tell(), path.name))
                    file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            text = json.dumps(about, default=reader.in_file)
            replace_file(path.with_name(f"{path.name}.json"), text.encode())
            self.last = step
        except OSError as error:
            log.warning("Step %d is not kept in memory: %s.", step, words_of(error))
        return time.monotonic() - began

    def newest(self, above: int = -1, below: float = math.inf) -> reader.Saved | None:
        """The newest state of which the hosts have every part; all processes call it.

        Args:
          above: Steps up to this one are left out.
          below: This step and later ones are left out.
        """
        lists = {step: x for step, x in self._read_lists().items() if above < step < below}
        mine = {step: [x["parts"] for x in of_host] for step, of_host in lists.items()}
        texts = gather("memory/held", json.dumps(mine), timeout_seconds=SECONDS)
        by_process = [json.loads(text) for text in texts]
        for step in sorted({int(x) for held in by_process for x in held}, reverse=True):
            own = lists.get(step, [])
            first = json.dumps({**own[0], "parts": {}} if own else None)
            texts = gather("memory/about", first, timeout_seconds=SECONDS)
            about = next(x for x in map(json.loads, texts) if x is not None)
            of_hosts = [by_process[i].get(str(step), []) for i in self._firsts]
            held = {
                name: [{*map(_from_json, _named(name, of_host))} for of_host in of_hosts]
                for name in about["shapes"]
            }
            if all(_has_all(shape, held[name]) for name, shape in about["shapes"].items()):
                described = reader.from_file(about["described"])
                read = functools.partial(self._read_all, step, own, held, described)
                return reader.Saved(step, str(self.folder), described, about["beside"], read)
        return None

    def _read_all(
        self,
        step: int,
        own: Sequence[JsonObject],
        held: Mapping[str, list[set[Bounds]]],
        described: dict[str, JsonObject],
        target: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        """Reads a state, of which this host has `own`, and each host the parts `held`."""
        arrays = dict[str, jax.Array]()
        for name, want in target.items():
            words = self._read(want, self._mapped(own, name, want.dtype), held[name])
            arrays[name] = reader.as_saved(words, described[name]["dtype"])
        self.last = step
        return arrays

    def _read(
        self, want: jax.ShapeDtypeStruct, own: _Parts, held: Sequence[set[Bounds]]
    ) -> jax.Array:
        """An array from the parts of all hosts; a part that a host lacks is sent to all."""
        placed = parts.placement(want.shape, want.sharding)
        for bounds in sorted(set[Bounds]().union(*held)):
            is_lacked = any(
                bounds not in held[self.hosts[device.process_index]]
                and parts.overlap(bounds, wanted)
                for device, wanted in placed.items()
            )
            if is_lacked:
                owner = next(i for i, host in enumerate(held) if bounds in host)
                part = own.get(bounds, np.zeros([b - a for a, b in bounds], want.dtype))
                own = own | {bounds: _sent(part, self._firsts[owner])}
        whole = np.empty(want.shape, want.dtype)  # The parts that are not here take no memory.
        for bounds, values in own.items():
            whole[tuple(slice(*along) for along in bounds)] = values
        devices = want.sharding
        return jax.make_array_from_callback(want.shape, devices, lambda i: np.asarray(whole[i]))

    def _mapped(self, own: Sequence[JsonObject], name: str, dtype: np.dtype) -> _Parts:
        """The parts of an array that this host has."""
        found: _Parts = {}
        for place in _named(name, [x["parts"] for x in own]):
            bounds, (_, offset, file) = _from_json(place), place
            shape = [stop - start for start, stop in bounds]
            size = math.prod(shape) * dtype.itemsize
            words = np.memmap(self.folder / file, np.uint8, "r", offset, size)
            found[bounds] = words.view(dtype).reshape(shape)
        return found

    def _read_lists(self) -> dict[int, list[JsonObject]]:
        """The lists that the processes of this host have written, by step."""
        lists: dict[int, list[JsonObject]] = {}
        for path in self.folder.glob("*.*.json"):
            lists.setdefault(int(path.name.partition(".")[0]), []).append(reader.read_object(path))
        return lists

    def close(self, *, keeps: bool) -> None:
        """Removes all states, unless the run keeps some for its next start."""
        self._open.close()
        if not (keeps and any(self.folder.glob("*.json"))):
            shutil.rmtree(self.folder, ignore_errors=True)


def _together(key: str, value: str, reason: str) -> list[str]:
    """The values of all processes; raises a FileSystemError on all if one has a reason."""
    texts = gather(key, json.dumps([value, reason]), timeout_seconds=SECONDS)
    answers = [json.loads(text) for text in texts]
    for process, (_, against) in enumerate(answers):
        if against:
            raise FileSystemError(f"process {process}: {against}")
    return [value for value, _ in answers]


def _available_bytes() -> int:
    """The memory that programs of this machine can take; 0 if it is not known."""
    with contextlib.suppress(OSError):
        return 1024 * int(re.findall(r"MemAvailable: +(\d+)", _MEMORY.read_text())[0])
    return 0


def _sent(part: np.ndarray, source: int) -> np.ndarray:
    """A part of one process, on all."""
    # As bytes: JAX adds up what all processes send, and 0 and -0 would be 0.
    words = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    sent = np.asarray(from_process(source, words))
    return sent.view(part.dtype).reshape(part.shape)


def _named(name: str, lists: Sequence[JsonObject]) -> list[_Place]:
    """The places of an array's parts in these lists."""
    return [place for places in lists for place in places.get(name, ())]


def _from_json(place: _Place) -> Bounds:
    return tuple((start, stop) for start, stop in place[0])


def _has_all(shape: Sequence[int], held: Sequence[set[Bounds]]) -> bool:
    """Whether the parts of the hosts are the whole array."""
    return sum(map(parts.num_elements, set[Bounds]().union(*held))) == math.prod(shape)


def _is_left(folder: Path) -> bool:
    """Whether the run of a folder has ended, ten minutes ago or more."""
    with contextlib.suppress(OSError), open(folder / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - folder.stat().st_mtime > LEFT_SECONDS
    return False
