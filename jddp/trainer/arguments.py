"""Checks the arguments of `fit` before anything is read: their combinations and types.

Each message names the missing argument, or the conflict, and the way out.
"""

from collections.abc import Mapping

from jddp.data import TrainBatches
from jddp.errors import ConfigError

# Methods of a callback.
METHODS = ("on_step", "on_eval", "on_save", "on_end", "on_begin", "on_epoch", "on_exception")


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


def steps_left(batches: object) -> int:
    """Number of steps until the end of `TrainBatches` of some epochs."""
    assert isinstance(batches, TrainBatches), "others have a number of steps"
    # None are left where the run starts from another one, which has ended.
    return max(1, len(batches.positions_left()))


def check_callbacks(callbacks: object) -> None:
    """Refuses objects that lack a method of a callback.

    Raises:
      ConfigError: If this is not a sequence, or an object in it lacks a method.
    """
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(
            f"callbacks= is of type {type(callbacks).__name__}. Give a list of callbacks."
        )
    for number, callback in enumerate(callbacks):
        missing = [name for name in METHODS if not callable(getattr(callback, name, None))]
        if isinstance(callback, type):
            name = callback.__name__
            raise ConfigError(f"callbacks[{number}] is the class {name}. Give an object: {name}().")
        if missing:
            raise ConfigError(
                f"callbacks[{number}] is of type {type(callback).__name__}, which has no method "
                f"{missing[0]}. Give an object of a class that derives from jddp.Callback."
            )
