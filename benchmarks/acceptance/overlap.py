"""The share of the collectives that runs beside other kernels, with `overlap` on and off."""

import tempfile
from collections.abc import Sequence

import jax

from acceptance.equal import BUCKET_MB
from acceptance.jobs import gpt, step_seconds
from acceptance.result import SKIP, Machine, PartResult
from jddp.config.options import Reduction
from jddp.ground.errors import DataError
from jddp.inspection.doctor import OK, WARN
from jddp.workbench.trace import DeviceTime, read_trace

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
            found.append(_times(folder))
    if machine.is_gpu:
        return judge_overlap(*found)
    return PartResult(SKIP, "traces are recorded and read; CPUs share the cores that would overlap")


def _times(folder: str) -> Sequence[DeviceTime]:
    """The time of each device in a trace; empty if it holds no kernels."""
    try:
        return [*read_trace(folder).devices.values()]
    except DataError:
        return ()


def judge_overlap(on: Sequence[DeviceTime], off: Sequence[DeviceTime]) -> PartResult:
    """The result for the times of all devices, with overlap on and off."""
    sums = [DeviceTime(*map(sum, zip(*times, strict=True))) for times in (on, off) if times]
    if len(sums) < 2 or not all(x.communication for x in sums):
        fix = "Install CUPTI of the same CUDA: without it a profile has no kernels."
        return PartResult(WARN, "the trace shows no collective", fix)
    lines = ["| overlap | collectives, ms | beside kernels |", "| --- | ---: | ---: |"]
    for name, x in zip(("on", "off"), sums, strict=True):
        lines.append(f"| {name} | {x.communication * 1e3:.2f} | {x.hidden_share:.0%} |")
    details = "\n".join([*lines, "", f"Sums over {len(on)} devices, {_NUM_STEPS} steps and more."])
    shares = [x.hidden_share for x in sums]
    what = "{:.0%} of the collectives beside kernels, {:.0%} when off".format(*shares)
    if shares[0] > shares[1]:
        return PartResult(OK, what, details=details)
    return PartResult(WARN, what, "overlap does not help here: overlap=False is as fast.", details)
