"""Passes a model the arrays of a batch that its `__call__` takes: inputs, and others by name.

    logits = call_model(model, batch["image"], train, batch.get("mask"))
    outputs(model, batch)         # evaluation mode; reads "image", "tokens" or "x"

Losses by name call models in this way, and so do predictions that name no function of their own.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from jddp.ground.errors import ConfigError

Model = Callable[..., Any]  # A bound Linen module, or an NNX module in the right mode.
ArrayBatch = Mapping[str, Array]

# Names that modules have for the argument of training or evaluation, with its value in training.
_MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}

# Arrays of a batch that a model gets besides its inputs, and the way out if it does not take one.
_NEEDED = {
    "categories": "Choose model.name=tabular, or leave the categorical columns out.",
    "segments": "Choose model.name=gpt, or data.kwargs.documents=mask.",
}


def call_model(
    model: Model, inputs: Array, train: bool, mask: Array | None = None, **needed: Array | None
) -> Any:
    """The model's outputs, in training or evaluation mode.

    The mode is passed as `train`, `training`, `is_training` or `deterministic`, if `__call__` has
    such an argument. The mask of valid rows is passed as `mask`, for batch norms, if it has that
    argument. The categories of a table are passed as `categories`, and the documents of a packed
    row as `segments`.

    Raises:
      ConfigError: If there are categories or segments, and the model has no argument for them.
    """
    parameters = inspect.signature(model).parameters
    given = {name: x for name, x in needed.items() if x is not None}
    if unknown := [name for name in given if name not in parameters]:
        raise ConfigError(
            f"The batch holds {unknown[0]}, and the model has no argument {unknown[0]!r} in "
            f"__call__. {_NEEDED[unknown[0]]}"
        )
    options: dict[str, Any] = {name: train == value for name, value in _MODES.items()}
    if mask is not None:
        options["mask"] = mask
    options |= given
    return model(inputs, **{name: x for name, x in options.items() if name in parameters})


def outputs(model: Model, batch: ArrayBatch) -> Any:
    """The outputs of a model in evaluation mode for the inputs of one of these losses."""
    for name in ("image", "tokens", "x"):
        if name in batch:
            inputs = batch[name][:, :-1] if name == "tokens" else batch[name]
            needed = {name: batch.get(name) for name in _NEEDED}
            return call_model(model, inputs, False, **needed)
    raise ConfigError(
        f"The batch holds {', '.join(batch)}, of which none is known for the model's inputs. Give "
        "predict a function(model, batch)."
    )
