"""The error of a step that is out of memory, with smaller steps that would fit.

It is recognized by the messages of XLA, CUDA, cuDNN, cuBLAS and NCCL. Smaller steps are compiled
without autotuning, which would run kernels on a full GPU. A job of several processes then compiles
nothing: all processes take part in autotuning, and only some may be out of memory.
"""

import contextlib
import functools
import re
from collections.abc import Iterator

import jax

from jddp.distributed.watchdog import Watchdog
from jddp.engine.compiled import Trainable
from jddp.ground.errors import OutOfMemoryError
from jddp.ground.typing import Batch
from jddp.inspection.memory import Memory, in_words
from jddp.inspection.memory import memory as memory_of
from jddp.modules.rows import count_rows

NOTHING_FITS = (
    "One row at a time is too much: choose a smaller model, or an optimizer with less state."
)
_FITS = (
    "It fits, so something else takes the memory: another program on the device (nvidia-smi lists "
    "them), arrays that this program keeps, larger batches in evaluation, fragmentation, or cuDNN, "
    "cuBLAS, NCCL and CUDA graphs, for which a smaller XLA_CLIENT_MEM_FRACTION leaves more. Or the "
    "version of a library is not the one that JAX needs."
)
_TOGETHER = "jddp.train --dry-run, or jddp.memory on each process, finds what would fit."
# A whole message of each, and its source, stand in tests/trainer/test_out_of_memory.py.
WORDS = (
    r"Out of memory (?:while trying to allocate|allocating)",  # XLA's clients of GPUs and CPUs
    r"ran out of memory",  # XLA's allocator (BFC) and command buffers (CUDA graphs)
    r"[Ff]ailed to allocate",  # XLA's requests, constants and scratch memory
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",  # CUDA: driver and runtime
    r"Cuda failure (?:\d+ )?'out of memory'",  # NCCL's own allocations
    r"CU[A-Z]+_STATUS_ALLOC_FAILED|the resource allocation failed",  # cuDNN, cuBLAS, cuSOLVER
    # Any other lack of memory, except the memory that the threads of one kernel share.
    r"RESOURCE_EXHAUSTED: (?!(?:Shared|Tensor) memory size limit)[^\n]*[Mm]emory",
    # Libraries that do not start, mostly because they lack memory.
    r"DNN library initialization failed|[Cc]ould not create cudnn handle",
    r"[Ff]ailed to create cublas handle",
)
_WORDS = re.compile("|".join(WORDS))


@contextlib.contextmanager
def explained(ddp: Trainable, batch: Batch, watchdog: Watchdog) -> Iterator[None]:
    """While open, a device that runs out of memory raises an error with an explanation.

    Args:
      ddp: A `jddp.DataParallel`, which steps.
      batch: Shapes of this process's rows.
      watchdog: Watchdog, which has the phase and allows time for compiling smaller steps.

    Raises:
      OutOfMemoryError: With smaller steps that would fit; or, if the step
        itself fits, with other uses of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _WORDS.search(str(error)):
            raise
        phase, reason = watchdog.phase, str(error).partition("\n")[0][:300]
        watchdog.enter("compile", 0)
        text = f"out of memory in phase {phase}: {_explain(ddp, batch, reason)}"
        explanation = OutOfMemoryError(text)
        vars(explanation).update(vars(error))  # The run, if one had begun.
        raise explanation from error


def _explain(ddp: Trainable, batch: Batch, reason: str) -> str:
    if jax.process_count() > 1:
        return f"{reason}. {_TOGETHER}"
    try:
        memory = memory_of(ddp, batch, autotune=False)
        needs, has = in_words(memory.peak), in_words(memory.limit)
        program = "init" if memory.start > memory.total else "a step"
        found = f"{program} needs {needs} of each device, which has {has}"
        if memory.fits:
            return f"{found}. {_FITS} XLA reports: {reason}"
        ways = ", or ".join(ways_out(ddp, batch, memory, autotune=False))
        return f"{found}. " + (f"What would fit: {ways}." if ways else NOTHING_FITS)
    except (RuntimeError, MemoryError):  # XLA may need memory to compile.
        return f"{reason}."


def ways_out(
    ddp: Trainable, batch: Batch, memory: Memory, *, autotune: bool = True
) -> Iterator[str]:
    """The micro-batches, and the smaller global batch, with which a compiled step fits, if any.

    Args:
      ddp: A `jddp.DataParallel`, which steps.
      batch: Shapes of this process's rows.
      memory: Memory of the step, which does not fit.
      autotune: Whether the compiler may try kernels on the devices.
    """
    measure = functools.partial(memory_of, ddp, autotune=autotune)
    accumulate_steps, num_rows = ddp.steps.rows.accumulate_steps, count_rows(batch)
    of_replica = num_rows // len(ddp.mesh.local_devices) // accumulate_steps
    for cut in memory.cuts(of_replica):
        num_steps = accumulate_steps * cut
        if (needed := measure(batch, accumulate_steps=num_steps)).fits:
            yield f"accumulate_steps={num_steps} ({in_words(needed.total)})"
            break
    for cut in memory.cuts(of_replica):
        rows = num_rows // cut
        fewer = jax.tree.map(lambda x, rows=rows: x.update(shape=(rows, *x.shape[1:])), batch)
        if (needed := measure(fewer)).fits:
            yield f"a global batch of {rows * jax.process_count()} ({in_words(needed.total)})"
            break
