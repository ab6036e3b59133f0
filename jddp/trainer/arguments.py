"""Checks the arguments of `fit` before anything is read: their combinations and types.

Each message names the missing argument, or the conflict, and the way out.
"""

from collections.abc import Mapping

from jddp.data import TrainBatches
from jddp.errors import ConfigError
from jddp.typing import Batches

METHODS = ("on_step", "on_eval", "on_save", "on_end")  # methods of a callback


def epochs_of(
    batches: Batches | None,
    data: object,
    global_batch_size: int | None,
    num_steps: int | None,
    num_epochs: float | None,
) -> float | None:
    """Returns the number of epochs, or None if steps are counted; refuses conflicting arguments.

    If no length is given, `TrainBatches` with a number of epochs end with the last epoch.

    Args:
      batches: Batches of this process, or None.
      data: Arrays or a data set, or None.
      global_batch_size: Examples per step, of data.
      num_steps: Number of optimizer steps, or None.
      num_epochs: Number of epochs, of data or of the batches themselves, or None.

    Raises:
      ConfigError: If one that is needed is missing, or two exclude each other.
    """
    if batches is not None and data is not None:
        raise ConfigError("batches and data= exclude each other: give one of them.")
    if batches is None and data is None:
        raise ConfigError(
            "batches are missing: fit(batches, num_steps=...), or "
            "fit(data=..., global_batch_size=..., num_steps=...)."
        )
    if isinstance(batches, Mapping):  # which iterates over its keys
        raise ConfigError("batches is a dict of arrays. Give it as data=, with global_batch_size=.")
    if data is not None and global_batch_size is None:
        raise ConfigError(
            "global_batch_size= is missing: data= is split into batches of that size."
        )
    if num_steps is not None and num_epochs is not None:
        raise ConfigError("num_steps= and num_epochs= exclude each other: give one of them.")
    own = batches.num_epochs if isinstance(batches, TrainBatches) else None
    if num_epochs is not None and data is None and own != num_epochs:
        raise ConfigError(
            f"num_epochs={num_epochs!r} counts passes over data=, or over "
            f"jddp.data.TrainBatches(num_epochs={num_epochs!r}). For other batches give num_steps=."
        )
    if num_steps is None and num_epochs is None and own is None:
        of_data = "fit(data=..., global_batch_size=..., num_steps=...), or num_epochs="
        example = "fit(batches, num_steps=...)" if data is None else of_data
        raise ConfigError(f"num_steps= is missing: {example}.")
    return own if num_steps is None and num_epochs is None else num_epochs


def steps_left(batches: Batches) -> int:
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
