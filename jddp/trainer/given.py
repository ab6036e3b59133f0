"""Compares the arguments and batches of a job's processes before the first step.

    compare_calls(options, batches, state)        # arguments of `fit`, seeds, orders, lengths
    refuse_same_rows("batches", batch, options)   # a first batch that several processes have

Processes with different arguments hang in a collective, or compute nonsense. Processes that read
the same rows repeat each other's work, and count every row of an evaluation several times. A job of
one process exchanges nothing here.
"""

import hashlib
import json
import math
from collections.abc import Sized

import jax
import numpy as np

from jddp.data.batches import Share
from jddp.distributed.agree import agree
from jddp.distributed.coordination import gather
from jddp.engine.host_rows import as_arrays
from jddp.engine.state import by_path
from jddp.errors import ProcessMismatchError
from jddp.trainer.options import Options
from jddp.typing import Batch, Batches

SECONDS = 120.0  # the other processes may still be busy
# Rows whose values fit into fewer bits may be equal by chance, or because there are no others.
LEAST_BITS = 32.0
MOST_VALUES = 2**16  # values that are read to count the bits

WAY_OUT = (
    "Give each process its own rows: jddp.data.TrainBatches and eval_batches do, if you make them "
    "after the process has joined its job. If equal rows are intended: "
    "checks=jddp.Checks(same_batches=True)."
)


def compare_calls(options: Options, batches: Batches, state: object) -> None:
    """Compares the arguments of `fit` of all processes.

    Args:
      options: Length of the run, and periods of what it does.
      batches: This process's training batches.
      state: Initial state, or a function that makes one.

    Raises:
      ProcessMismatchError: On every process, if an argument differs, or two read one share.
    """
    if jax.process_count() == 1:
        return
    facts: dict[str, object] = {**options.common}
    facts["state"] = "a function" if callable(state) else "a state"
    facts["run_dir"] = "none" if options.run_dir is None else "given"
    facts |= _about("batches", batches, options.num_steps or math.inf)
    facts["evaluate"] = "none" if options.evaluation.batches is None else "given"
    facts |= _about("evaluate", options.evaluation.batches, math.inf)
    agree("call of fit", {name: str(value) for name, value in facts.items()})
    for name, given in (("batches", batches), ("evaluate", options.evaluation.batches)):
        share = getattr(given, "share", None)
        if isinstance(share, Share) and not options.checks.same_batches:
            _refuse_equal(name, str(share), f"each reads {share} of the rows")


def _about(name: str, batches: object, most: float) -> dict[str, object]:
    """Facts about batches that must be equal on all processes, as far as the batches know them."""
    known = {}
    if isinstance(getattr(batches, "share", None), Share) and hasattr(batches, "settings"):
        known = batches.settings
    elif isinstance(batches, Sized):
        known = {"number of batches": min(len(batches), most)}
    return {f"{name}: {key}": value for key, value in known.items()}


def refuse_same_rows(name: str, batch: Batch, options: Options) -> None:
    """Refuses a first batch that several processes have.

    Args:
      name: Argument of `fit` from which it comes.
      batch: The batch, on the host or on devices of this process.
      options: Settings of the run, one of which permits it.

    Raises:
      ProcessMismatchError: On every process, if several have the same rows, unless all rows are
        equal, or so few and small that they may be the same by chance.
    """
    if jax.process_count() > 1 and not options.checks.same_batches:
        _refuse_equal(name, digest_of_rows(batch), "the first batch has the same rows on each")


def _refuse_equal(name: str, mine: str, how: str) -> None:
    texts = gather(f"given/{name}", mine, timeout_seconds=SECONDS)
    for process, text in enumerate(texts):
        if text and text in texts[:process]:
            first = texts.index(text)
            raise ProcessMismatchError(
                f"{name}= of processes {first} and {process} are the same: {how} ({text}). "
                f"{WAY_OUT}"
            )


def digest_of_rows(batch: Batch) -> str:
    """A digest of the rows; empty if equal digests would not prove that rows are the same.

    This holds if all rows of a process are equal, as in a synthetic batch, if all values fit into a
    few bits, and if an array is spread over processes.
    """
    digest = hashlib.sha256()
    num_bits = 0.0
    for path, x in sorted(by_path(as_arrays(batch)).items()):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return ""
        array = np.asarray(x)
        if array.dtype.hasobject or array.ndim == 0:
            continue
        digest.update(json.dumps([path, str(array.dtype), array.shape]).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
        num_bits += bits_in_rows(array)
    return digest.hexdigest()[:12] if num_bits >= LEAST_BITS else ""


def bits_in_rows(array: np.ndarray) -> float:
    """Bits that encode all values of the rows, among the values that occur; 0 if all are equal."""
    rows = array.reshape(len(array), -1) if array.size else array.reshape(0, 1)
    if len(rows) == 0 or (len(rows) > 1 and all(_same(row, rows[0]) for row in rows)):
        return 0.0
    flat = rows.reshape(-1)[:MOST_VALUES]
    values = {flat[i : i + 1].tobytes() for i in range(len(flat))}
    return flat.size * math.log2(len(values))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()
