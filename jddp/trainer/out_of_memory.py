"""What fits on a device where a step does not, and the error of one that is out of memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jddp.distributed.watchdog import Watchdog
from jddp.errors import OutOfMemoryError
from jddp.inspection.memory import Memory, in_words
from jddp.modules.rows import count_rows
from jddp.typing import Batch

NOTHING_FITS = (
    "One row at a time is too much: choose a smaller model, an optimizer with less state, or "
    "devices with more memory."
)


@contextlib.contextmanager
def explained(ddp: Any, batch: Batch, watchdog: Watchdog) -> Iterator[None]:
    """While open, out of memory on a device becomes an error with an explanation.

    Args:
      ddp: A `jddp.DataParallel`, which steps.
      batch: Shapes of this process's rows.
      watchdog: Watchdog, which has the phase and allows time for compiling smaller steps.

    Raises:
      OutOfMemoryError: With the largest arrays, and what would fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not ("RESOURCE_EXHAUSTED" in str(error) and "memory" in str(error).lower()):
            raise
        phase = watchdog.phase
        watchdog.enter("compile", 0)
        explanation = OutOfMemoryError(_explain(ddp, batch, phase))
        vars(explanation).update(vars(error))  # with the run, if one had begun
        raise explanation from error


def _explain(ddp: Any, batch: Batch, phase: str) -> str:
    memory = ddp.memory(batch)
    needs, has = in_words(memory.total), in_words(memory.limit)
    found = f"out of memory in phase {phase}: a step needs {needs} of each device, which has {has}"
    large = [f"{in_words(x.bytes)} {x}" for x in memory.largest if x.bytes > memory.total / 100]
    if large:
        found += f". The largest arrays: {', '.join(large)}"
    ways = ", or ".join(ways_out(ddp, batch, memory))
    return f"{found}. " + (f"What would fit: {ways}." if ways else NOTHING_FITS)


def ways_out(ddp: Any, batch: Batch, memory: Memory) -> Iterator[str]:
    """More micro-batches and a smaller batch with which a step fits, as compiled; if any.

    Args:
      ddp: A `jddp.DataParallel`, which steps.
      batch: Shapes of this process's rows.
      memory: Memory of the step, which is too much.
    """
    accumulate_steps, num_rows = ddp.spec.backward.num, count_rows(batch)
    of_replica = num_rows // len(ddp.mesh.local_devices) // accumulate_steps
    for cut in memory.cuts(of_replica):
        num_steps = accumulate_steps * cut
        if (needed := ddp.memory(batch, accumulate_steps=num_steps)).fits:
            yield f"accumulate_steps={num_steps} ({in_words(needed.total)})"
            break
    for cut in memory.cuts(of_replica):
        rows = num_rows // cut
        fewer = jax.tree.map(lambda x, rows=rows: x.update(shape=(rows, *x.shape[1:])), batch)
        if (needed := ddp.memory(fewer)).fits:
            yield f"a global batch of {rows * jax.process_count()} ({in_words(needed.total)})"
            break
