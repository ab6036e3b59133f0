"""How much of the collectives runs beside other kernels, with `overlap` on and off."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

from jddp.doctor.acceptance.equal import BUCKET_MB
from jddp.doctor.acceptance.jobs import gpt, step_seconds
from jddp.doctor.acceptance.result import SKIP, Machine, PartResult
from jddp.doctor.acceptance.trace import Covered, read_trace, shares
from jddp.doctor.finding import OK, WARN

_NUM_STEPS = 5


def overlap(machine: Machine) -> PartResult:
    """Records traces of some steps, and reads the shares of their collectives."""
    job, found = gpt(machine, "medium", machine.num_devices), {}
    for is_on in (True, False):
        size = BUCKET_MB[machine.platform]
        ddp = job.replicate(layout="flat", overlap=is_on, bucket_mb=size)
        step_seconds(ddp, job.batch, _NUM_STEPS)  # which compiles
        with tempfile.TemporaryDirectory(prefix="jddp-") as folder:
            with jax.profiler.trace(folder):
                step_seconds(ddp, job.batch, _NUM_STEPS)
            paths = Path(folder).rglob("*.trace.json.gz")
            found[is_on] = shares(event for path in paths for event in read_trace(path))
    return judge_overlap(found)


def judge_overlap(found: Mapping[bool, Mapping[str, Covered]]) -> PartResult:
    """The result for the shares of each device, by whether overlap is on."""
    sums = {
        is_on: Covered(*map(sum, zip(*by.values(), strict=True)))
        for is_on, by in found.items()
        if by
    }
    if not sums:
        return PartResult(SKIP, "traces are recorded and read; they have no lanes of a device")
    lines = [
        "| overlap | device | collectives, ms | beside kernels |",
        "| --- | --- | ---: | ---: |",
    ]
    for is_on, by in found.items():
        for device, share in by.items():
            row = f"| {share.collectives / 1e3:.2f} | {_percent(share)} |"
            lines.append(f"| {'on' if is_on else 'off'} | {device} {row}")
    details = "\n".join(lines)
    if not all(share.collectives for share in sums.values()) or len(sums) < 2:
        return PartResult(WARN, "the trace shows no collective", details=details)
    what = f"{_percent(sums[True])} of the collectives beside kernels; {_percent(sums[False])} off"
    on, off = (sums[is_on].beside / sums[is_on].collectives for is_on in (True, False))
    if on > off:
        return PartResult(OK, what, details=details)
    return PartResult(WARN, what, "overlap does not help here: overlap=False is as good.", details)


def _percent(share: Covered) -> str:
    return f"{share.beside / share.collectives:.0%}" if share.collectives else "-"
