"""Checks what `fit` is given before the first step: arguments, their combinations, processes.

    compare_calls(options, batches, state)        # arguments of `fit`, seeds, orders, lengths
    refuse_same_rows("batches", batch, options)   # a first batch that several processes have

Each message names the missing argument, or the conflict, and the way out. Processes with different
arguments hang in a collective, or compute nonsense. Processes that read the same rows repeat each
other's work, and count every row of an evaluation several times. A job of one process exchanges
nothing here.
"""

import hashlib
import json
from collections.abc import Mapping, Sized

import jax
import numpy as np

from jddp.data import TrainBatches
from jddp.data.batches import Share
from jddp.distributed.coordination import agree, gather
from jddp.engine.compiled import Trainable
from jddp.engine.state import by_path
from jddp.ground.errors import ConfigError, ProcessMismatchError
from jddp.ground.typing import Batch, Batches
from jddp.modules.rows import as_arrays
from jddp.trainer.options import Options
from jddp.trainer.run import Callback

SECONDS = 120.0  # the other processes may still be busy
MOST_BYTES = 128  # of rows that may be equal by chance, or because there are no others
METHODS = [name for name in vars(Callback) if name.startswith("on_")]
WAY_OUT = (
    "Give each process its own rows: jddp.data.TrainBatches and eval_batches do, if you make them "
    "after the process has joined its job. If equal rows are intended: "
    "checks=jddp.Checks(same_batches=True)."
)


def epochs_of(
    batches: object,
    global_batch_size: int | None,
    num_steps: int | None,
    num_epochs: float | None,
) -> float | None:
    """Returns the number of epochs, or None if steps are counted; refuses conflicting arguments.

    If no length is given, `TrainBatches` with a number of epochs end with the last epoch.

    Args:
      batches: Batches of this process; or with a batch size, arrays or a data set.
      global_batch_size: Examples per step, of arrays or a data set.
      num_steps: Number of optimizer steps, or None.
      num_epochs: Number of epochs, or None.

    Raises:
      ConfigError: If one that is needed is missing, or two exclude each other.
    """
    are_batches = global_batch_size is None
    if are_batches and isinstance(batches, Mapping):  # which iterates over its keys
        raise ConfigError(
            "global_batch_size= is missing: a dict of arrays is split into batches of that size."
        )
    if not are_batches and isinstance(batches, TrainBatches):
        raise ConfigError(
            f"global_batch_size={global_batch_size!r} splits arrays or a data set, and these are "
            "batches already. Leave it out."
        )
    if num_steps is not None and num_epochs is not None:
        raise ConfigError("num_steps= and num_epochs= exclude each other: give one of them.")
    own = batches.num_epochs if isinstance(batches, TrainBatches) else None
    if num_epochs is not None and are_batches and own != num_epochs:
        raise ConfigError(
            f"num_epochs={num_epochs!r} counts passes over arrays or a data set, which need "
            f"global_batch_size=, or over jddp.data.TrainBatches(num_epochs={num_epochs!r}). For "
            "other batches give num_steps=."
        )
    if num_steps is None and num_epochs is None and own is None:
        example = "fit(ddp, batches, num_steps=...)"
        if not are_batches:
            example = "fit(ddp, data, global_batch_size=..., num_steps=...), or num_epochs="
        raise ConfigError(f"num_steps= is missing: {example}.")
    return own if num_steps is None and num_epochs is None else num_epochs


def check_callbacks(callbacks: object) -> None:
    """Refuses anything but a list of objects with the methods of a callback.

    Raises:
      ConfigError: If this is not a sequence, or an object in it is a class or lacks a method.
    """
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks= is a list of callbacks; got {callbacks!r}.")
    for number, callback in enumerate(callbacks):
        missing = [name for name in METHODS if not callable(getattr(callback, name, None))]
        if missing or isinstance(callback, type):
            raise ConfigError(
                f"callbacks[{number}] is {callback!r}. Give an object, not a class, with the "
                "methods of jddp.Callback, such as an object of a class that derives from it."
            )


def compare_calls(options: Options, batches: Batches, state: object) -> None:
    """Compares the arguments of `fit` of all processes.

    Args:
      options: Length of the run, and periods of its actions.
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
    facts |= _about("batches", batches, options.num_steps)
    facts["evaluate"] = "none" if options.evaluation.batches is None else "given"
    facts |= _about("evaluate", options.evaluation.batches, None)
    agree("call of fit", {name: str(value) for name, value in facts.items()})
    for name, given in (("batches", batches), ("evaluate", options.evaluation.batches)):
        share = getattr(given, "share", None)
        if isinstance(share, Share) and not options.checks.same_batches:
            _refuse_equal(name, str(share), f"each reads {share} of the rows")


def _about(name: str, batches: object, most: int | None) -> dict[str, object]:
    """Facts about batches that must be equal on all processes, as far as the batches know them."""
    known = {}
    if isinstance(getattr(batches, "share", None), Share) and hasattr(batches, "settings"):
        known = batches.settings
    elif isinstance(batches, Sized):
        known = {"number of batches": min(len(batches), most or len(batches))}
    return {f"{name}: {key}": value for key, value in known.items()}


def refuse_same_rows(name: str, batch: Batch, options: Options) -> None:
    """Refuses a first batch that several processes have.

    Args:
      name: Argument of `fit` from which it comes.
      batch: The batch, on the host or on devices of this process.
      options: Settings of the run; one of them permits equal batches.

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

    This holds if all rows of a process are equal, as in a synthetic batch, if all values together
    have a few bytes, and if an array is spread over processes.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    for path, x in sorted(by_path(as_arrays(batch)).items()):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return ""
        array = np.asarray(x)
        if array.dtype.hasobject or array.ndim == 0:
            continue
        digest.update(json.dumps([path, str(array.dtype), array.shape]).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
        first = array[:1].tobytes()
        differ = len(array) == 1 or any(row.tobytes() != first for row in array)
        num_bytes += array.nbytes * differ
    return digest.hexdigest()[:12] if num_bytes > MOST_BYTES else ""


def fingerprint(ddp: Trainable, batch: Batch) -> dict[str, str]:
    """Returns facts that must be equal on all processes that step together.

    Args:
      ddp: A `jddp.DataParallel`.
      batch: This process's rows, or their `jax.ShapeDtypeStruct`s.

    Returns:
      Shape and dtype of each leaf of the state, by path, and a digest of the lowered step.
    """
    program = hashlib.sha256(ddp.steps.lower(batch).as_text().encode()).hexdigest()
    leaves = by_path(ddp.steps.abstract_state(batch)).items()
    return {name: f"{x.shape} {x.dtype}" for name, x in leaves} | {"the lowered step": program}
