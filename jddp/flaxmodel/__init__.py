"""Linen and NNX modules in one functional form: parameters, other state, and a run of the loss.

    model = functional(module)
    params, model_state = model.init(loss_fn, key, batch)
    outputs, model_state = model.train(loss_fn, params, model_state, batch, key)

Both are nested dicts of plain arrays, so that nothing of a module is on the hot path. A loss is
`loss_fn(model, batch, train)`; what it is handed as `model` is a bound Linen module, or an NNX
module in train or eval mode.
"""

import inspect
from collections.abc import Sequence
from typing import Any, cast

from flax import linen as nn
from flax import nnx

from jddp.batch_norm import MODES, Mode, Sync
from jddp.errors import ConfigError
from jddp.flaxmodel.form import (
    FlaxModel,
    LossFn,
    name_constants,
    stream,
    takes_constants,
    takes_train,
)
from jddp.flaxmodel.linen_model import LinenModel
from jddp.flaxmodel.nnx_model import NnxModel

__all__ = [
    "FlaxModel",
    "LossFn",
    "functional",
    "name_constants",
    "stream",
    "takes_constants",
    "takes_train",
]


def functional(
    model: Any,
    *,
    batch_norm: str = "sync",
    sync: Sync | None = None,
    per_replica: Sequence[str] = (),
) -> FlaxModel:
    """Returns the functional form of a Linen or NNX module; `FlaxModel` says what the options mean.

    Raises:
      ConfigError: If `model` is neither, or `batch_norm` is unknown.
    """
    if batch_norm not in MODES:
        raise ConfigError(f"batch_norm {batch_norm!r} is unknown. Choose one of {list(MODES)}.")
    form: FlaxModel
    if isinstance(model, nn.Module):
        form = LinenModel(model)
    elif isinstance(model, nnx.Module):
        form = NnxModel(model)
    else:
        what = f"the class {model.__name__}" if inspect.isclass(model) else type(model).__name__
        raise ConfigError(
            f"model is {what}. Give an instance of flax.linen.Module or flax.nnx.Module; "
            "docs/models.md shows how to make one of a function, or of another library's model."
        )
    form.batch_norm, form.sync = cast(Mode, batch_norm), sync or Sync("data")
    form.per_replica = tuple(per_replica)
    form.name = type(model).__name__
    return form
