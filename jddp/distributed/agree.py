"""Comparisons between the processes of a job, before their first collective.

    agree("config or version", {"sha256": digest})   # the same in all
    refuse_gpus(identity)                            # each GPU exists, and belongs to one process
    use_if_shared()                                  # one cache of compiled programs, or none

Processes with different code, configs or data would hang, or compute nonsense without an error.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import jax

from jddp.distributed.coordination import from_first, gather, num_processes, process_index
from jddp.distributed.gpus import list_gpus, may_use_gpus, num_nvidia, plugins
from jddp.distributed.identity import CUDA, Identity, shown
from jddp.distributed.rendezvous import refuse_differences
from jddp.ground.errors import ConfigError, report

_SECONDS = 120.0  # the other processes may still be busy
_IS_ON, _FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
_LATE_SECONDS = 2.0  # in which a file system shows what another host has written
_NO_CACHE, _SEEN, _UNSEEN = "no cache", "seen", "not seen"


def agree(subject: str, values: Mapping[str, str]) -> None:
    """Compares all processes' values with the values of process 0, before their first collective.

    Args:
      subject: Common name of the values, for the error.
      values: The values of this process, by name.

    Raises:
      ProcessMismatchError: On every process, if any differs.
    """
    texts = gather(f"agree/{subject}", json.dumps(values), timeout_seconds=_SECONDS)
    of_all = ((str(process), json.loads(text)) for process, text in enumerate(texts))
    refuse_differences("process", subject, of_all)


def refuse_gpus(identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
    """Refuses GPUs that do not exist, and GPUs that two processes share.

    Every process calls it, before devices start. CUDA silently leaves out GPUs that do not exist.
    NCCL does not connect two processes on one GPU, and reports this only minutes later. Numbers are
    compared as UUIDs, because each task of a scheduler may count its GPUs from 0. Without
    `nvidia-smi` only UUIDs are known.

    Raises:
      ConfigError: On every process, if any has such a GPU.
    """
    uses_cuda = any(name.startswith("cuda") for name in plugins())
    is_open = num_processes() > 1 or CUDA in environ
    own = list[str]()
    mistake = ""
    if uses_cuda and is_open and num_nvidia() and may_use_gpus(environ.get("JAX_PLATFORMS")):
        try:
            own = choose(environ, identity.local_device_ids, [gpu.uuid for gpu in list_gpus()])
        except ConfigError as error:
            mistake = str(error)
    texts = gather("gpus", json.dumps([own, mistake]), timeout_seconds=_SECONDS)
    owners = dict[str, int]()
    for process, (own, mistake) in enumerate(map(json.loads, texts)):
        if mistake:
            raise ConfigError(f"process {process}: {mistake}" if len(texts) > 1 else mistake)
        for uuid in own:
            if (other := owners.setdefault(uuid, process)) != process:
                raise ConfigError(
                    f"processes {other} and {process} have the same GPU, {uuid}, and NCCL cannot "
                    "connect them: start one process for each GPU, or one for all GPUs, and leave "
                    f"{CUDA} to the launcher."
                )


def choose(
    environ: Mapping[str, str], local_ids: Sequence[int] | None, uuids: Sequence[str]
) -> list[str]:
    """UUIDs of the GPUs that a process has.

    Args:
      environ: Environment, with CUDA_VISIBLE_DEVICES.
      local_ids: Numbers of its GPUs among the visible ones; None for all.
      uuids: UUIDs of the GPUs of the host; empty if they are not known.

    Raises:
      ConfigError: If one does not exist.
    """
    visible = list(uuids)
    if (text := environ.get(CUDA)) is not None:
        names = [name.strip() for name in text.split(",")]
        hidden = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        names = names[:hidden]  # The first such name hides all others.
        if not uuids and any(name.isdecimal() for name in names):
            return []
        visible = [_find(name, text, uuids) for name in names]
    if local_ids is None or not visible:
        return visible
    if max(local_ids) >= len(visible):
        raise ConfigError(
            f"local device {max(local_ids)} does not exist: this process sees {len(visible)} GPUs. "
            "Start no more processes than there are devices."
        )
    return [visible[i] for i in local_ids]


def _find(name: str, text: str, uuids: Sequence[str]) -> str:
    """The UUID of a GPU by its number or the beginning of its UUID; a MIG instance as it is."""
    if not uuids or name.startswith("MIG-"):
        return name
    if name.isdecimal() and int(name) < len(uuids):
        return uuids[int(name)]
    for uuid in uuids:
        if name.startswith("GPU-") and uuid.startswith(name):
            return uuid
    raise ConfigError(
        f"{CUDA}={shown(text)}: {name[:60]} is none of the {len(uuids)} GPUs that nvidia-smi lists "
        "here. Unset the variable if it was set for another host."
    )


def use_if_shared() -> None:
    """Switches JAX's cache of programs off unless all processes see a file of process 0 there.

    Every process of a job calls it, before it compiles anything. Every process reads the cache, and
    only process 0 writes it. If the others do not see its folder, process 0 finds programs there at
    the next start that the others have to compile. XLA's autotuner on GPUs divides its work over
    all processes: they would wait, up to a day, for one that does not compile.
    """
    place = (getattr(jax.config, _FOLDER) or "") if getattr(jax.config, _IS_ON) else ""
    is_first = process_index() == 0
    mark = ".jddp-not-written"
    with contextlib.ExitStack() as written:
        if is_first and place and "://" not in place:
            with contextlib.suppress(OSError):  # then no process sees it
                Path(place).mkdir(parents=True, exist_ok=True)
                file = written.enter_context(NamedTemporaryFile(dir=place, prefix=".jddp-"))
                mark = Path(file.name).name
        sent = from_first("cache/mark", json.dumps([place, mark]), timeout_seconds=_SECONDS)
        seen = gather("cache/seen", _look_for(place, *json.loads(sent)), timeout_seconds=_SECONDS)
    if set(seen) in ({_NO_CACHE}, {_SEEN}):
        return
    jax.config.update(_IS_ON, False)
    if is_first:
        blind = len(seen) - seen.count(_SEEN)
        where = place or "a cache that it does not have"
        report(
            f"the cache of compiled programs is off: {blind} of {len(seen)} processes do not see "
            f"the files of process 0 in {where}, and would wait for programs that it does not "
            "compile. Set XDG_CACHE_HOME to a directory that all of them share."
        )


def _look_for(place: str, first_place: str, name: str) -> str:
    """Whether this process, with a cache at `place`, sees the file of process 0."""
    if not place:
        return _NO_CACHE
    until = time.monotonic() + _LATE_SECONDS
    while not (place == first_place if "://" in place else Path(place, name).exists()):
        if time.monotonic() > until:
            return _UNSEEN
        time.sleep(0.05)
    return _SEEN
