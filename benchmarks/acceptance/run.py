"""Starts the parts one after the other, each in its own process, and writes the page.

A part that takes too long is killed with all processes that it has started. A part that fails is
"bad", with the end of its output. The other parts still run.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from acceptance.page import page, verdict
from acceptance.part import PROGRAM, read_result
from acceptance.parts import PARTS
from acceptance.result import SKIP, Machine, Part, PartResult
from jddp.distributed.apart import started_apart
from jddp.distributed.gpus import add_flag, may_use_gpus
from jddp.ground.errors import DeviceError, ExitCode, file_errors, show
from jddp.inspection.doctor import BAD, Finding

_LAST_LINES = 15
_SLOWER = 4  # a trial on CPUs, which other programs may use too
_ERROR = "jddp: "  # begins the line of an error


def accept(file: Path, *, platform: str, num_devices: int) -> ExitCode:
    """Runs all parts, writes the page, and returns the exit code of the command.

    Args:
      file: Page to write, in Markdown.
      platform: "gpu"; "cpu" tries the procedure on virtual devices, and accepts no GPU.
      num_devices: Number of virtual devices.

    Raises:
      DeviceError: If the platform has no device.
      FileSystemError: If the page cannot be written.
    """
    environ = environment(os.environ, platform, num_devices)
    is_new = not file.exists()
    with file_errors(f"{file} cannot be written"):
        file.touch()  # before minutes are spent
    parts = [run_part("devices", Machine(platform), environ)]
    if not (facts := parts[0].result.facts):
        if is_new:
            file.unlink()
        raise DeviceError(_error_of(parts[0].result))
    machine = Machine(platform, **facts)
    with tempfile.TemporaryDirectory(prefix="jddp-") as cache:
        # For programs and chosen kernels, which the parts share.
        cached = {"JAX_COMPILATION_CACHE_DIR": cache, **environ}
        for name in PARTS:
            if name != "devices":
                parts.append(run_part(name, machine, cached))
            show(f"{parts[-1].title}\n{Finding(*parts[-1].result[:3])}")
    with file_errors(f"{file} cannot be written"):
        file.write_text(page(parts, machine, environ))
    show(f"\n{verdict(parts)}: {file}")
    is_good = all(part.result.level != BAD for part in parts)
    return ExitCode.DONE if is_good else ExitCode.REPLICA_MISMATCH


def _error_of(result: PartResult) -> str:
    """The error that ended a part, in one line; without an error, how the part ended."""
    errors = [x for x in result.details.splitlines() if x.startswith(_ERROR)]
    return errors[-1].removeprefix(_ERROR) if errors else f"the devices do not start: {result.what}"


def environment(environ: Mapping[str, str], platform: str, num_devices: int) -> dict[str, str]:
    """The environment of all parts: devices, and no GPU memory taken in advance."""
    made = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environ}
    platforms = made.get("JAX_PLATFORMS")
    if platform == "cpu":
        made |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
        made["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # nothing is measured, and compiling is long
    elif platforms and may_use_gpus(platforms) and "cpu" not in platforms.split(","):
        made["JAX_PLATFORMS"] = f"{platforms},cpu"  # a step is compared with it
    add_flag(made)
    return made


def run_part(name: str, machine: Machine, environ: Mapping[str, str]) -> Part:
    """Runs a part in its own process."""
    task = PARTS[name]
    if task.needs_several and machine.num_devices < 2:
        return Part(task.title, PartResult(SKIP, "not tried: one device"))
    flags = f"{environ.get('XLA_FLAGS', '')} {task.environ.get('XLA_FLAGS', '')}".strip()
    limit = task.seconds * (1 if machine.is_gpu else _SLOWER)
    paths = os.pathsep.join(filter(None, sys.path))  # where a part finds this package and jddp
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with started_apart("cleanup") as guard:  # which kills its remaining processes
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, name, *map(str, machine)],
                env={**environ, **task.environ, "XLA_FLAGS": flags, "PYTHONPATH": paths},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            guard.write(b"%d\n" % process.pid)
            try:
                how = f"ended with exit code {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                how = f"exceeded {limit} s"
        process.wait()
        log.seek(0)
        output = log.read()
    last = "\n".join(output.splitlines()[-_LAST_LINES:])
    failed = PartResult(BAD, how, details=f"```text\n{last}\n```")
    result = read_result(output) or failed
    given = ", ".join(f"`{name}={value}`" for name, value in task.environ.items())
    details = "\n\n".join(filter(None, (given, result.details)))
    return Part(task.title, result._replace(details=details), time.monotonic() - began)
