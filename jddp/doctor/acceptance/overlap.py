"""The share of the collectives that runs beside other kernels, with `overlap` on and off."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

from jddp.config.options import Reduction
from jddp.doctor.acceptance.equal import BUCKET_MB
from jddp.doctor.acceptance.jobs import gpt, step_seconds
from jddp.doctor.acceptance.result import SKIP, Machine, PartResult
from jddp.doctor.acceptance.trace import Covered, read_trace, shares
from jddp.doctor.finding import OK, WARN

_NUM_STEPS = 5


def overlap(machine: Machine) -> PartResult:
    """Records traces of a few steps, and reads the shares of their collectives."""
    job, found = gpt(machine, "medium", machine.num_devices), []
    for is_on in (True, False):
        size = BUCKET_MB[machine.platform]
        ddp = job.replicate(reduction=Reduction(bucket_mb=size, layout="flat", overlap=is_on))
        step_seconds(ddp, job.batch, _NUM_STEPS)  # which compiles
        with tempfile.TemporaryDirectory(prefix="jddp-") as folder:
            with jax.profiler.trace(folder):
                step_seconds(ddp, job.batch, _NUM_STEPS)
            paths = Path(folder).rglob("*.trace.json.gz")
            found.append(shares(event for path in paths for event in read_trace(path)))
    if machine.is_gpu or any(found):
        return judge_overlap(*found)
    return PartResult(SKIP, "traces are recorded and read; traces of CPUs have no device lanes")


def judge_overlap(on: Mapping[str, Covered], off: Mapping[str, Covered]) -> PartResult:
    """The result for the shares of each device, with overlap on and off."""
    sums = [Covered(*map(sum, zip(*by.values(), strict=True))) for by in (on, off) if by]
    if len(sums) < 2 or not all(x.collectives for x in sums):
        fix = "Install CUPTI of the same CUDA: without it a profile has no kernels."
        return PartResult(WARN, "the trace shows no collective", fix)
    lines = ["| overlap | collectives, ms | beside kernels |", "| --- | ---: | ---: |"]
    for name, x in zip(("on", "off"), sums, strict=True):
        lines.append(f"| {name} | {x.collectives / 1e3:.2f} | {x.share:.0%} |")
    details = "\n".join([*lines, "", f"Sums over {len(on)} devices, {_NUM_STEPS} steps and more."])
    what = f"{sums[0].share:.0%} of the collectives beside kernels, {sums[1].share:.0%} when off"
    if sums[0].share > sums[1].share:
        return PartResult(OK, what, details=details)
    return PartResult(WARN, what, "overlap does not help here: overlap=False is as fast.", details)
