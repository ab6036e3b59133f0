"""Checks the arguments of `fit` before anything is read: their combinations and types.

Each message names the missing argument, or the conflict, and the way out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jddp.data import TrainBatches, eval_batches
from jddp.errors import ConfigError
from jddp.typing import Batches

METHODS = ("on_step", "on_eval", "on_save", "on_end")  # methods of a callback


def check_batches(
    batches: Any,
    data: Any,
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
    own = getattr(batches, "num_epochs", None)
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


def choose_batches(
    batches: Any, data: Any, evaluation: Any, num_steps: int | None, **options: Any
) -> tuple[Batches, Batches | None, dict[str, Any]]:
    """Returns batches, evaluation batches, length and seed of a run; makes batches of arrays.

    Args:
      batches: Batches of this process, if there are no data.
      data: A dict of arrays or a data set, the same on every process, if there are no batches.
      evaluation: Batches of this process, a dict of arrays, or None.
      num_steps: Number of optimizer steps, if there is no number of epochs.
      **options: Options of `TrainBatches`; None for an option that is not given. A number of
        epochs may also be given beside `TrainBatches` with the same number.

    Raises:
      ConfigError: If one that is needed is missing, or two exclude each other.
    """
    size = options["global_batch_size"]
    num_epochs = check_batches(batches, data, size, num_steps, options["num_epochs"])
    if data is not None:
        batches = TrainBatches(data, **options | {"num_epochs": num_epochs})
    if isinstance(evaluation, Mapping):
        evaluation = eval_batches(evaluation, global_batch_size=size or 1024)
    # None are left where the run starts from another one, which has ended.
    length = max(1, len(batches.positions_left())) if num_steps is None else num_steps
    of_run = {"num_steps": length, "num_epochs": num_epochs, "seed": options["seed"]}
    return batches, evaluation, of_run


def check_callbacks(callbacks: Sequence[Any]) -> None:
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
