"""Preflight checks of a job: each process examines its machine, and all examine what they share.

    is_fit = examine(directory, num_devices=8)     # called by every process; prints the findings

They find causes of failures that are hard to diagnose in a job of many processes: host names that
resolve to loopback, unused GPUs, container limits, unshared directories, wrong sums.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
import statistics
import textwrap
import time
import timeit
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jddp.config.versions import versions
from jddp.distributed import coordination
from jddp.distributed.gpus import ON_PURPOSE, Missing, driver_version, gpu_facts, num_nvidia
from jddp.distributed.identity import resolve_identity
from jddp.distributed.join import configure_devices, initialize, require_devices
from jddp.engine.calls import from_process
from jddp.engine.mesh import AXIS, make_mesh, over_replicas, put_rows
from jddp.ground.errors import Error, show

OK, WARN, BAD = "ok", "warn", "bad"
COLUMNS = 80
SECONDS = 120.0
# A directory seen later counts as not shared; NFS caches absence for 3 to 60 s.
VISIBLE_SECONDS = 15.0
SIZES = tuple(4 * 2**k for k in range(10, 25, 2))  # 4 KiB to 64 MiB
ROUNDS = 7
SLOW_SECONDS = 0.5  # After a slower size no larger one is measured.


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
      level: "ok"; "warn", if it may slow a job down or confuse; "bad", if it will stop a job.
      what: Description of the finding.
      fix: Fix, if the level is not ok.
    """

    level: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        """Lines of at most 80 columns, the first with the level."""
        head = f"  {self.level:<4}  "
        rest = " " * 8
        what = textwrap.wrap(self.what, COLUMNS, initial_indent=head, subsequent_indent=rest)
        fix = textwrap.wrap(self.fix, COLUMNS, initial_indent=rest, subsequent_indent=rest)
        return "\n".join([*what, *fix])


def examine(directory: Path, *, num_devices: int) -> bool:
    """Examines machine, devices and job, and prints the findings. Every process calls it.

    Args:
      directory: Directory of runs, which must be shared.
      num_devices: Number of virtual CPU devices of all processes, if there is no GPU.

    Returns:
      Whether no finding will stop a job.
    """
    findings = [*check_host()]
    identity = resolve_identity()
    per_process = max(1, num_devices // identity.num_processes)
    configure_devices(per_process * identity.num_processes, num_processes=identity.num_processes)
    try:
        initialize(identity)
        # Devices that differ would wait at their start.
        coordination.agree("devices", gpu_facts(os.environ))
        missing = require_devices()
    except Error:
        show("\n".join(map(str, findings)))  # A finding may be the reason.
        raise
    findings += check_devices(missing)
    mine = json.dumps(list(map(str, findings)))
    of_processes = coordination.gather("doctor", mine, timeout_seconds=120)
    shared = check_job(directory)
    mesh = make_mesh(jax.devices())  # Devices may be of different kinds.
    table, right = measure_all_reduce(mesh)
    shared += right
    if coordination.process_index() == 0:
        _print(of_processes, shared, table)
    levels = {finding.level for finding in (*findings, *shared)}
    return BAD not in levels


def _print(of_processes: list[str], shared: list[Finding], table: Sequence[object]) -> None:
    found: list[list[str]] = list(map(json.loads, of_processes))
    for process, findings in enumerate(found):
        if process and _comparable(findings) == _comparable(found[0]):
            print(f"process {process}: same as process 0")
        else:
            show("\n".join([f"process {process}", *findings]))
    show("\n".join(["together", *map(str, shared)]))
    print("\nall-reduce", f"{'size':>10} {'time':>13} {'bandwidth':>14}", *table, sep="\n")


def _comparable(findings: list[str]) -> list[str]:
    """The findings without the good name of a host."""
    return [x for x in findings if not (x.lstrip().startswith(OK) and " resolves to " in x)]


def check_job(directory: Path) -> list[Finding]:
    """Compares all processes. Every process calls it, and gets the same findings.

    Args:
      directory: Directory of runs, which must be shared.
    """
    if (mistake := coordination.explain_unjoined()) is not None:
        return [Finding(BAD, *mistake)]
    if coordination.num_processes() == 1:
        return [Finding(OK, "one process: nothing to compare")]
    shared = coordination.gather("doctor/versions", json.dumps(versions()), timeout_seconds=SECONDS)
    return [
        Finding(OK, f"{len(shared)} processes are connected"),
        *compare_versions(list(map(json.loads, shared))),
        *compare_sight(directory, _sight(directory)),
    ]


def compare_versions(shared: list[Mapping[str, str]]) -> Iterator[Finding]:
    """Whether all processes run the same packages.

    Args:
      shared: Versions by package, of each process.
    """
    differ = {name for other in shared for name in other if other[name] != shared[0].get(name)}
    for name in sorted(differ):
        found = [other.get(name, "absent") for other in shared]
        process = next(i for i, version in enumerate(found) if version != found[0])
        what = f"{name} is {', '.join(dict.fromkeys(found))}: process {process} differs from "
        yield Finding(BAD, f"{what}process 0.", "Install the same version everywhere.")


def _sight(directory: Path) -> list[float | None]:
    """Seconds until each process sees a file that process 0 writes; None for never."""
    nonce = coordination.from_first("doctor/nonce", secrets.token_hex(8), timeout_seconds=SECONDS)
    file = directory / f".jddp-doctor-{nonce}"
    if coordination.process_index() == 0:
        with contextlib.suppress(OSError):  # After an error no process sees the file.
            directory.mkdir(parents=True, exist_ok=True)
            file.write_text("")
    coordination.from_first("doctor/written", "", timeout_seconds=SECONDS)
    start = time.monotonic()
    while not file.exists() and time.monotonic() - start < VISIBLE_SECONDS:
        time.sleep(0.02)
    late = time.monotonic() - start if file.exists() else None
    shared = coordination.gather("doctor/seen", json.dumps(late), timeout_seconds=SECONDS)
    if coordination.process_index() == 0:
        file.unlink(missing_ok=True)
    return [json.loads(x) for x in shared]


def compare_sight(directory: Path, seen: list[float | None]) -> Iterator[Finding]:
    """Whether all processes see the same directory, for runs and checkpoints.

    Args:
      directory: The directory.
      seen: Seconds until each process saw a new file in it; None for never.
    """
    if blind := [i for i, late in enumerate(seen) if late is None]:
        what = f"{directory.absolute()}: process {', '.join(map(str, blind))} does not see, within "
        what += f"{VISIBLE_SECONDS:.0f} s, a file that process 0 writes there."
        yield Finding(BAD, what, "Use a run.dir in a directory that all hosts share.")
        return
    latest = max(late for late in seen if late is not None)
    yield Finding(OK, f"all see {directory.absolute()}, the last one after {1e3 * latest:,.0f} ms")


class AllReduceTime(NamedTuple):
    """The time of an all-reduce.

    Attributes:
      size: Bytes on each device.
      seconds: Median of several runs.
      bandwidth: Bytes per second into and out of each device: a ring moves 2 (N - 1) / N sizes.
    """

    size: int
    seconds: float
    bandwidth: float

    def __str__(self) -> str:
        """A row: size, time, bandwidth."""
        size = f"{self.size / 2**20:,.0f} MiB" if self.size >= 2**20 else f"{self.size >> 10} KiB"
        return f"{size:>10} {1e3 * self.seconds:10.3f} ms {self.bandwidth / 1e9:9.3f} GB/s"


def measure_all_reduce(
    mesh: jax.sharding.Mesh, sizes: Sequence[int] = SIZES
) -> tuple[list[AllReduceTime], list[Finding]]:
    """Times sums of whole numbers over all devices, and checks their results.

    Every process calls it. Whole numbers have one right sum, in any order.
    """
    total = mesh.size * (mesh.size - 1) // 2
    own = [i for i, device in enumerate(mesh.devices.flat) if device in mesh.local_devices]
    ranks = np.array(own, np.float32)[:, None]
    run = jax.jit(over_replicas(lambda x: jax.lax.psum(x[0], AXIS), mesh, jax.P(AXIS), jax.P()))

    def median_seconds(rows: jax.Array | np.ndarray) -> float:
        # The first run may compile.
        _, *seconds = timeit.repeat(
            lambda: jax.block_until_ready(run(rows)), repeat=ROUNDS, number=1
        )
        return statistics.median(seconds)

    table = list[AllReduceTime]()
    wrong = list[int]()
    for size in sizes:
        rows = put_rows(np.repeat(ranks, size // 4, axis=1), mesh)
        summed = np.asarray(run(rows).addressable_data(0))
        if (summed != total).any():
            wrong.append(size)
        seconds = median_seconds(rows)
        moved = 2 * (mesh.size - 1) / mesh.size * size
        table.append(AllReduceTime(size, seconds, moved / seconds))
        if float(from_process(0, np.float64(seconds))) > SLOW_SECONDS:
            break
    if wrong:
        what = f"Sums of {', '.join(map(str, wrong))} bytes over the devices came out wrong."
        fix = "Exclude devices one by one (CUDA_VISIBLE_DEVICES, --nodelist) to find a faulty one."
        return table, [Finding(BAD, what, fix)]
    return table, [Finding(OK, f"sums over {mesh.size} devices are right, in {len(table)} sizes")]


def check_host() -> Iterator[Finding]:
    """Checks this host, before JAX is initialized."""
    yield Finding(OK, ", ".join(f"{name} {version}" for name, version in versions().items()))
    name = socket.gethostname()
    yield check_name(name, addresses_of(name))
    yield from check_shared_memory(num_nvidia())


def addresses_of(name: str) -> list[str]:
    """The addresses that a name resolves to, if any."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})


def check_name(name: str, addresses: Sequence[str]) -> Finding:
    """Whether other hosts can reach this one by its name."""
    way_out = f"Set JAX_COORDINATOR_ADDRESS=<address>:<port>, or give {name} its own address in "
    way_out += "/etc/hosts."
    if not addresses:
        return Finding(WARN, f"{name}, the name of this host, resolves to no address.", way_out)
    listed = ", ".join(addresses)
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        what = f"{name} resolves only to {listed}: other hosts would reach themselves by it."
        return Finding(WARN, what, f"A job on this host alone is fine. {way_out}")
    return Finding(OK, f"{name} resolves to {listed}")


def check_shared_memory(num_gpus: int) -> Iterator[Finding]:
    """Whether /dev/shm is large enough for NCCL, which may connect GPUs of a host through it."""
    size = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    if num_gpus and size < 2**30:
        what = f"/dev/shm holds {size / 2**20:,.0f} MiB, but NCCL needs more for {num_gpus} GPUs."
        fix = "In a container, start it with --shm-size=16g or --ipc=host."
        yield Finding(BAD if num_gpus > 1 else WARN, what, fix)
    elif num_gpus:
        yield Finding(OK, f"/dev/shm holds {size / 2**30:,.1f} GiB")


def check_devices(missing: Missing | None = None) -> Iterator[Finding]:
    """Checks the devices of this process.

    Args:
      missing: The missing part, if CPUs are used although a GPU was to be expected.
    """
    here, everywhere = jax.local_devices(), jax.devices()
    kind = f"{here[0].platform} devices here ({here[0].device_kind})"
    yield Finding(OK, f"{len(here)} {kind}, {len(everywhere)} in all")
    if len(kinds := Counter(device.device_kind for device in everywhere)) > 1:
        mixed = " and ".join(f"{num} x {kind}" for kind, num in kinds.items())
        what = f"The devices are {mixed}: each step waits for the slowest."
        yield Finding(WARN, what, "Choose with CUDA_VISIBLE_DEVICES, or exclude the host.")
    if missing is not None:
        yield Finding(BAD, f"JAX runs on CPUs. {missing.what}", f"{missing.fix} {ON_PURPOSE}")
    if here[0].platform == "gpu" and (version := driver_version()) is not None:
        yield Finding(OK, f"NVIDIA driver {version}")
