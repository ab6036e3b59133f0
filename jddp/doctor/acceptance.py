"""Acceptance of a machine with GPUs in five minutes, and a page of its result.

    parts = [bandwidth(devices), equality(devices)]
    parts += [kill_and_resume(folder, devices, num_steps=3000)]
    text = page(parts, devices)

The parts are the all-reduce, beside the published one of a known machine; a step on all devices,
against one device; and a run that is killed and resumed, against one that is not.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jddp.checkpoint.folders import finished
from jddp.config.versions import source_hash, versions
from jddp.distributed.join import configure_devices, require_devices
from jddp.doctor.devices import check_devices
from jddp.doctor.finding import BAD, OK, WARN, Finding
from jddp.doctor.links import measure_all_reduce
from jddp.engine.mesh import make_mesh
from jddp.errors import DeviceError, ExitCode, file_errors, show
from jddp.verification.verify import verify
from jddp.zoo.losses import cross_entropy
from jddp.zoo.models import CNN
from jddp.zoo.optimizers import make_optimizer

# GB/s of an all-reduce by MiB on each device: nccl-tests on eight H200 with NVLink, NCCL 2.30, from
# https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/README.md
PUBLISHED = {1: 72, 4: 140, 16: 242, 64: 370, 256: 442}
NUM_STEPS = {"gpu": 3000, "cpu": 60}  # a third of them takes seconds, in which the run is killed


class Part(NamedTuple):
    """One part of the acceptance.

    Attributes:
      title: Title of its section on the page.
      finding: Result of the part.
      details: Measurements, in Markdown.
    """

    title: str
    finding: Finding
    details: str


def accept(file: Path, *, platform: str, num_devices: int) -> ExitCode:
    """Runs all parts, writes the page, and returns the exit code of the command.

    Args:
      file: Page to write, in Markdown.
      platform: "gpu"; "cpu" tries the procedure on virtual devices, and accepts no GPU.
      num_devices: Number of virtual devices.

    Raises:
      DeviceError: If there are not two devices of the platform.
      FileSystemError: If the page cannot be written.
    """
    if platform == "cpu":
        configure_devices(num_devices)
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"  # of the runs
    # The runs have the same GPUs as this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    require_devices()
    devices = jax.devices()
    if devices[0].platform != platform or not devices[1:]:
        raise DeviceError(
            f"--gpu-acceptance needs two GPUs or more, and JAX has {len(devices)} "
            f"{devices[0].platform} devices. pip install 'jddp[cuda12]', or try the procedure with "
            "--platform cpu."
        )
    with tempfile.TemporaryDirectory(prefix="jddp-") as folder:
        resumed = kill_and_resume(Path(folder), devices, num_steps=NUM_STEPS[platform])
    parts = [bandwidth(devices), equality(devices), resumed]
    with file_errors(f"{file} cannot be written"):
        file.write_text(page(parts, devices))
    show("\n".join([*(str(part.finding) for part in parts), "", str(file)]))
    is_good = all(part.finding.level != BAD for part in parts)
    return ExitCode.DONE if is_good else ExitCode.REPLICA_MISMATCH


def bandwidth(devices: Sequence[jax.Device], sizes: Sequence[int] = tuple(PUBLISHED)) -> Part:
    """Times all-reduces of these sizes, in MiB, and checks their sums."""
    table, (finding,) = measure_all_reduce(make_mesh(devices), [size * 2**20 for size in sizes])
    lines = ["| MiB | ms | GB/s | published |", "| ---: | ---: | ---: | ---: |"]
    for size, seconds, rate in table:
        known = PUBLISHED.get(size >> 20, "")
        lines.append(f"| {size >> 20} | {1e3 * seconds:.3f} | {rate / 1e9:.1f} | {known} |")
    lines += ["", "Published: nccl-tests on eight H200 with NVLink, NCCL 2.30."]
    return Part("All-reduce", finding, "\n".join(lines))


def equality(devices: Sequence[jax.Device]) -> Part:
    """Compares a step of the default model on all devices with one device, without TF32."""
    rng, rows = np.random.default_rng(0), 32 * len(devices)
    images = rng.standard_normal((rows, 28, 28, 1), np.float32)
    batch = {"image": images, "label": rng.integers(10, size=rows, dtype=np.int32)}
    optimizer, _ = make_optimizer("adamw", schedule=lambda step: 1e-3)
    with jax.default_matmul_precision("highest"):
        report = verify(CNN(), optimizer, cross_entropy, batch, mesh=list(devices))
    level, equals = (OK, "equals") if report.passed else (BAD, "does NOT equal")
    finding = Finding(level, f"a step on {len(devices)} devices {equals} one device")
    return Part("One device against all", finding, f"```text\n{report}\n```")


def kill_and_resume(folder: Path, devices: Sequence[jax.Device], *, num_steps: int) -> Part:
    """Trains through the launcher, and again with a SIGKILL; compares the last states bitwise."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    train = ["jddp.train", f"mesh.num_devices={len(devices)}", f"train.num_steps={num_steps}"]
    train += [f"checkpoint.every_steps={num_steps // 3}"]
    whole, killed = folder / "whole", folder / "killed"

    def start(*words: str) -> subprocess.Popen[bytes]:
        # NVLS adds in the switch, where two calls may differ.
        env = os.environ | {"XLA_FLAGS": flags, "NCCL_NVLS_ENABLE": "0"}
        command = [sys.executable, "-m", *words]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    start("jddp.launch", f"--logs={folder}/logs", "-m", *train, f"run.dir={whole}").communicate()
    with start(*train, f"run.dir={killed}") as process:
        while process.poll() is None and not steps_of(killed):
            time.sleep(0.005)
        process.kill()
    at = max(steps_of(killed), default=0)
    text = start(*train, f"run.dir={killed}").communicate()[0].decode()
    level, what = OK, f"a run killed after step {at} and resumed is bitwise identical"
    if not last_arrays(whole) or last_arrays(whole) != last_arrays(killed):
        level, what = BAD, what.replace("is bitwise", "is NOT bitwise")
    elif process.returncode >= 0 or f"resumed from step {at} " not in text:
        level, what = WARN, "the run ended before it could be killed: nothing was resumed"
    last = "".join(text.splitlines()[-1:])
    return Part("Kill and resume", Finding(level, what), f"The resumed run: `{last}`")


def steps_of(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    folder = run / "checkpoints"
    return finished(folder) if folder.is_dir() else []


def last_arrays(run: Path) -> dict[str, object]:
    """Shapes, dtypes and digests of the arrays of a run's last checkpoint; empty if it has none."""
    if not (steps := steps_of(run)):
        return {}
    return json.loads((run / "checkpoints" / str(steps[-1]) / "arrays.json").read_text())


def page(parts: Sequence[Part], devices: Sequence[jax.Device]) -> str:
    """The page, in Markdown."""
    trial = "A trial of the GPU acceptance on CPUs: no result of GPUs"
    title = "GPU acceptance" if devices[0].platform == "gpu" else trial
    facts = [f"{len(devices)} x {devices[0].device_kind}", *(x.what for x in check_devices())]
    facts += [f"{name} {version}" for name, version in versions().items()]
    facts += [f"code of jddp {source_hash()[:12]}", f"{datetime.date.today()}"]
    lines = [f"# {title}", "", ", ".join(facts), "", "| part | result |", "| --- | --- |"]
    lines += [f"| {part.title} | {part.finding.level}: {part.finding.what} |" for part in parts]
    lines += [f"\n## {part.title}\n\n{part.details}" for part in parts]
    return "\n".join([*lines, ""])
