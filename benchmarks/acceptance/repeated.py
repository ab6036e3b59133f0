"""Whether the same step gives the same result each time."""

import os

import jax
import numpy as np

from acceptance.jobs import gpt
from acceptance.result import Machine, PartResult
from jddp.ground.typing import PyTree
from jddp.inspection.doctor import BAD, OK

FLAG = "--xla_gpu_deterministic_ops=true"
DETERMINISTIC = {"XLA_FLAGS": FLAG, "NCCL_NVLS_ENABLE": "0"}
_NUM_RUNS = 5


def repeats(machine: Machine) -> PartResult:
    """Runs a step with a scatter several times from the same state, and compares its results."""
    job = gpt(machine, "medium", machine.num_devices)
    ddp = job.replicate(donate=False)
    state, rows = ddp.init(0, job.batch), ddp.shard_batch(job.batch)

    def run() -> PyTree:
        after, metrics = ddp.step(state, rows)
        return jax.device_get((after.params, after.opt_state, metrics))

    first, others = run(), [run() for _ in range(_NUM_RUNS - 1)]
    return judge_runs(sum(not _is_same(first, other) for other in others), len(others))


def judge_runs(num_different: int, num: int) -> PartResult:
    """The result of runs that are compared with the first of them."""
    is_required = FLAG in os.environ.get("XLA_FLAGS", "")
    if num_different == 0:
        return PartResult(OK, f"{num + 1} runs of a step are bitwise identical")
    what = f"{num_different} of {num} runs of a step differ from the first"
    if is_required:
        return PartResult(BAD, f"{what}, with {FLAG} and NCCL_NVLS_ENABLE=0")
    words = (
        "Not deterministic, as usual: a scatter adds with atomic operations. For bitwise identical "
        f"runs, set XLA_FLAGS={FLAG} and NCCL_NVLS_ENABLE=0."
    )
    return PartResult(OK, what, details=words)


def _is_same(a: PyTree, b: PyTree) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)
