"""Checks that compare the processes of a job: versions, clocks, a shared directory."""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from jddp.config.versions import versions
from jddp.distributed import coordination
from jddp.distributed.schedulers import explain_unjoined, unjoined_job
from jddp.doctor.finding import BAD, OK, WARN, Finding
from jddp.errors import words_of

SECONDS = 60.0
VISIBLE_SECONDS = 15.0  # then a directory counts as not shared; NFS caches absence for 3 to 60
CLOSE_SECONDS = 1.0


def check_job(directory: Path) -> list[Finding]:
    """Compares all processes. Every process calls it, and gets the same findings.

    Args:
      directory: Directory of runs, which must be shared.
    """
    if (job := unjoined_job()) is not None:
        return [Finding(BAD, *explain_unjoined(job))]
    if coordination.num_processes() == 1:
        return [Finding(OK, "one process: nothing to compare")]
    shared = coordination.gather("doctor/versions", json.dumps(versions()), timeout_seconds=SECONDS)
    return [
        Finding(OK, f"{len(shared)} processes are connected"),
        *compare_versions(list(map(json.loads, shared))),
        *compare_clocks(_clocks()),
        *compare_sight(directory, _sight(directory)),
    ]


def check_directory(directory: Path) -> Finding:
    """Whether a mebibyte can be written into a directory, or the nearest existing one above it.

    Every process of a run writes into its directory.
    """
    path = directory.absolute()
    there = next(x for x in (path, *path.parents) if os.path.lexists(x))
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(bytes(2**20))
        free = shutil.disk_usage(there).free / 2**30
    except OSError as error:
        what = f"{path} cannot be written: {words_of(error)}."
        return Finding(BAD, what, "Free some space, or choose another directory for run.dir.")
    what = f"{there} can be written, {free:,.1f} GiB free"
    if there != path:
        return Finding(WARN, f"{path} does not exist; {what}.", f"If it is right: mkdir -p {path}.")
    if free < 1:
        return Finding(WARN, f"{what}.", "Free some space: a run keeps several checkpoints.")
    return Finding(OK, what)


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


def _clocks() -> list[tuple[float, float]]:
    """Seconds by which each clock is ahead of process 0's clock, and their uncertainty."""
    found = []
    for i in range(1, coordination.num_processes()):
        name = f"jddp/doctor/clock/{i}"
        if coordination.process_index() == 0:
            sent = time.time()
            coordination.publish(f"{name}/asked", "")
            there = float(coordination.read(f"{name}/answer", SECONDS, of=i))
            back = time.time()
            found.append((there - (sent + back) / 2, (back - sent) / 2))
        elif coordination.process_index() == i:
            coordination.read(f"{name}/asked", SECONDS, of=0)
            coordination.publish(f"{name}/answer", repr(time.time()))
    shared = coordination.from_first("doctor/clocks", json.dumps(found), timeout_seconds=SECONDS)
    return [(float(ahead), float(width)) for ahead, width in json.loads(shared)]


def compare_clocks(clocks: list[tuple[float, float]]) -> Iterator[Finding]:
    """Whether the times in logs of several hosts can be compared.

    Args:
      clocks: Seconds by which each process but the first is ahead, and their uncertainty.
    """
    wrong = {i: x for i, (x, width) in enumerate(clocks, 1) if abs(x) - width > CLOSE_SECONDS}
    for i, ahead in wrong.items():
        where = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} process 0's"
        what = f"The clock of process {i} is {where}: logs and files will seem out of order."
        yield Finding(WARN, what, "Synchronize the clocks with chrony or systemd-timesyncd.")
    if not wrong:
        most = max((abs(ahead) + width for ahead, width in clocks), default=0.0)
        yield Finding(OK, f"clocks are within {1e3 * most:,.0f} ms of each other")


def _sight(directory: Path) -> list[float | None]:
    """Seconds until each process sees a file that process 0 writes; None for never."""
    nonce = coordination.from_first("doctor/nonce", secrets.token_hex(8), timeout_seconds=SECONDS)
    file = directory / f".jddp-doctor-{nonce}"
    if coordination.process_index() == 0:
        with contextlib.suppress(OSError):  # then no process sees it
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
