"""Measurements: bandwidth, scaling, memory, and the cost of synchronized batch norm."""

import jax

from acceptance.jobs import gpt, resnet, step_seconds
from acceptance.published import Published, choose_figure, link_of, topology
from acceptance.result import SKIP, Machine, PartResult
from jddp.engine.mesh import make_mesh
from jddp.inspection.doctor import OK, WARN, Finding, measure_all_reduce
from jddp.inspection.explain import explain
from jddp.inspection.memory import in_words, memory, peak_bytes

_SIZES = {"gpu": (1, 4, 16, 64, 256), "cpu": (1, 2)}  # MiB
_NUM_STEPS = {"gpu": 20, "cpu": 4}
LEAST_EFFICIENCY = 0.8
LEAST_MEMORY, MOST_MEMORY = 0.8, 1.3  # peak, relative to the prediction


def bandwidth(machine: Machine) -> PartResult:
    """Times all-reduces, checks their sums, and compares the largest with a published figure."""
    sizes = [size << 20 for size in _SIZES[machine.platform]]
    table, (sums,) = measure_all_reduce(make_mesh(jax.devices()), sizes)
    lines = ["| MiB | ms | GB/s |", "| ---: | ---: | ---: |"]
    for size, seconds, rate in table:
        lines.append(f"| {size >> 20} | {1e3 * seconds:.3f} | {rate / 1e9:.1f} |")
    row = choose_figure(machine.kind, link_of(topology()))
    if row:
        lines.append(f"\nPublished: {row.bandwidth:g} GB/s, {row.machine},\n<{row.source}>")
    finding = sums if sums.level != OK else judge_bandwidth(table[-1].bandwidth / 1e9, row)
    return PartResult(*finding, details="\n".join(lines))


def judge_bandwidth(rate: float, row: Published | None) -> Finding:
    """Compares GB/s of the largest message with a published figure."""
    if row is None:
        return Finding(OK, f"sums are right; {rate:.1f} GB/s; none is published for this machine")
    what = f"{rate:.0f} GB/s; {row.bandwidth:g} GB/s are published for {row.link}"
    if rate >= row.bandwidth / 2:
        return Finding(OK, f"sums are right; {what}")
    fix = "Check with NCCL_DEBUG=INFO and nvidia-smi topo -m which links NCCL uses."
    return Finding(WARN, what, fix)


def scaling(machine: Machine) -> PartResult:
    """Tokens a second on one device and on all, with equally many rows on each."""
    lines = ["| devices | step | tokens a second |", "| ---: | ---: | ---: |"]
    rates = {}
    for num in (1, machine.num_devices):
        job = gpt(machine, "large", num)
        ddp = job.replicate(mesh=jax.devices()[:num])
        seconds = step_seconds(ddp, job.batch, _NUM_STEPS[machine.platform])
        rows, length = job.batch["tokens"].shape
        rates[num] = rows * (length - 1) / seconds
        lines.append(f"| {num} | {1e3 * seconds:.1f} ms | {rates[num]:,.0f} |")
    finding = judge_scaling(rates[machine.num_devices] / rates[1], machine)
    return PartResult(*finding, details="\n".join(lines))


def judge_scaling(ratio: float, machine: Machine) -> Finding:
    """Compares the rate of all devices, relative to the rate of one, with their number."""
    num = machine.num_devices
    what = f"{num} devices train {ratio:.2f} times as fast as one"
    if not machine.is_gpu:
        return Finding(OK, f"{what}; virtual devices share one processor")
    if ratio >= LEAST_EFFICIENCY * num:
        return Finding(OK, f"{what} ({ratio / num:.0%})")
    fix = "Look at bandwidth and overlap; in a step of a few ms, kernel launches dominate."
    return Finding(WARN, f"{what} ({ratio / num:.0%})", fix)


def peak_memory(machine: Machine) -> PartResult:
    """The predicted memory of a step, and the peak of a few steps."""
    job = gpt(machine, "medium", machine.num_devices)
    ddp = job.replicate()
    predicted = memory(ddp, job.batch)
    step_seconds(ddp, job.batch, 2)
    finding = judge_memory(predicted.peak, peak_bytes(jax.devices()))
    return PartResult(*finding, details=f"```text\n{predicted}\n```")


def judge_memory(predicted: int, peak: int | None) -> Finding:
    """Compares the peak with the prediction, both in bytes."""
    said = f"predicted {in_words(predicted)}"
    if peak is None:
        return Finding(SKIP, f"{said}; these devices have no memory statistics")
    what = f"{said}, peak {in_words(peak)}: {peak / predicted:.2f} times"
    if LEAST_MEMORY <= peak / predicted <= MOST_MEMORY:
        return Finding(OK, what)
    return Finding(WARN, what, "--dry-run has the same error: leave more memory free.")


def batch_norm(machine: Machine) -> PartResult:
    """Time and all-reduces of a step with synchronized and with local batch norm."""
    job, times = resnet(machine), {}
    lines = ["| batch norm | step | all-reduces |", "| --- | ---: | ---: |"]
    for mode in ("sync", "local"):
        ddp = job.replicate(batch_norm=mode)
        num = sum(x.op == "all-reduce" for x in explain(ddp, job.batch).compiled)
        times[mode] = step_seconds(ddp, job.batch, _NUM_STEPS[machine.platform])
        lines.append(f"| {mode} | {1e3 * times[mode]:.2f} ms | {num} |")
    what = f"a step takes {times['sync'] / times['local']:.2f} times as long as with local"
    return PartResult(OK, what, details="\n".join(lines))
