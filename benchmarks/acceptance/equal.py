"""Whether results are right: against one device, against the CPU, with large buckets."""

import jax

from acceptance.jobs import Workload, adam, cnn, gpt
from acceptance.result import Machine, PartResult
from jddp.config.options import Reduction
from jddp.inspection.doctor import BAD, OK, WARN
from jddp.inspection.explain import explain
from jddp.inspection.verification.findings import Comparison, Verification, compare
from jddp.inspection.verification.verify import verify

# The CPU's kernels are from another library. TF32 would be off by 1e-3 and more.
_TO_CPU = 5e-4
BUCKET_MB = {"gpu": 25.0, "cpu": 0.02}


def parity(machine: Machine) -> PartResult:
    """One step of the default model on all devices, against one device and against the CPU."""
    job, several = cnn(machine), machine.num_devices > 1
    with jax.default_matmul_precision("highest"):
        report = _verified(job) if several else None
        comparisons = _against_cpu(job)
    is_good = all(x.passed for x in comparisons) and (report is None or report.passed)
    others = "one device and the CPU" if several else "the CPU"
    rows = ["| against the CPU | error | allowed |", "| --- | ---: | ---: |"]
    rows += [f"| {x.what} | {x.error:.1e} | {x.allowed:.1e} |" for x in comparisons]
    details = "\n".join(rows) + (f"\n\n```text\n{report}\n```" if report else "")
    return _judged(is_good, others, details)


def _against_cpu(job: Workload) -> tuple[Comparison, Comparison]:
    """Compares loss and gradients of the same parameters."""
    ddp, cpu = job.replicate(), jax.devices("cpu")[0]
    state = ddp.init(0, job.batch)
    got = jax.device_get(ddp.gradients(state, job.batch))
    with jax.default_device(cpu):
        alone = job.replicate(mesh=[cpu])
        same = alone.init(0, job.batch, jax.device_get(state.params))
        want = jax.device_get(alone.gradients(same, job.batch))
    losses = ({"loss": metrics["loss"]} for _, metrics in (got, want))
    return (
        compare("loss", *losses, allowed=_TO_CPU),
        compare("gradients", got[0], want[0], allowed=_TO_CPU),
    )


def user_verify(machine: Machine) -> PartResult:
    """`jddp.verify` as a user calls it, in the precision that training will use."""
    report = _verified(gpt(machine, "small", machine.num_devices))
    return _judged(report.passed, "one device", f"```text\n{report}\n```")


def buckets(machine: Machine) -> PartResult:
    """A GPT whose gradients are sent in buckets that are too large for XLA's own kernel."""
    job = gpt(machine, "medium", machine.num_devices)
    most = BUCKET_MB[machine.platform]
    reduction = Reduction(bucket_mb=most, layout="flat")
    with jax.default_matmul_precision("highest"):
        report = _verified(job, reduction)
        explained = explain(job.replicate(reduction=reduction), job.batch)
    sent = [x.bytes for x in explained.compiled if x.op == "all-reduce"]
    large = sum(size > most * 2**20 / 2 for size in sent)
    details = f"```text\n{report}\n\n{explained}\n```"
    result = _judged(report.passed, "one device", details)
    what = f"{result.what}; {len(sent)} all-reduces of {sum(sent) / 2**20:.1f} MiB, {large} large"
    if result.level == OK and large < 2:
        fix = "The compiler has merged the buckets, so several large messages were not tried."
        return result._replace(level=WARN, what=what, fix=fix)
    return result._replace(what=what)


def _verified(job: Workload, reduction: Reduction | None = None) -> Verification:
    return verify(job.model, adam(), job.loss, job.batch, reduction=reduction)


def _judged(is_good: bool, others: str, details: str) -> PartResult:
    level, equals = (OK, "equals") if is_good else (BAD, "does NOT equal")
    return PartResult(level, f"a step {equals} {others}", details=details)
