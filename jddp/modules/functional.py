"""Linen and NNX modules in one functional form: parameters, other state, and a run of the loss.

    model = functional(module)
    params, model_state = model.init(loss_fn, key, batch)
    outputs, model_state = model.train(loss_fn, params, model_state, batch, key)

Both are nested dicts of plain arrays, so that nothing of a module is on the hot path. A loss is
`loss_fn(model, batch, train)`; its `model` is a bound Linen module, or an NNX module in train or
eval mode.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flax import linen as nn
from flax import nnx

from jddp.errors import ConfigError
from jddp.modules.base import FlaxModel, name_constants, stream, takes_constants, takes_train
from jddp.modules.batch_norm import MODES, REDUCTIONS, Mode, Sync
from jddp.modules.linen import LinenModel
from jddp.modules.nnx import NnxModel

__all__ = ["FlaxModel", "functional", "name_constants", "stream", "takes_constants", "takes_train"]


def functional(
    model: Any,
    *,
    batch_norm: str = "sync",
    sync: Sync | None = None,
    per_replica: Sequence[str] = (),
    state_reduction: Mapping[str, str] | None = None,
) -> FlaxModel:
    """Returns the functional form of a Linen or NNX module, with options as `FlaxModel` has them.

    Raises:
      ConfigError: If `model` is neither, or `batch_norm` or a `state_reduction` is unknown.
    """
    rules = dict(state_reduction or {})
    for kind, rule in rules.items():
        if rule not in REDUCTIONS or kind in per_replica:
            raise ConfigError(
                f"state_reduction={{{kind!r}: {rule!r}}}: replicas agree by one of "
                f"{list(REDUCTIONS)}, or each keeps its own (per_replica). Choose one of these."
            )
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
    sync = dataclasses.replace(sync or Sync("data"), rules=tuple(rules.items()))
    form.batch_norm, form.sync = cast(Mode, batch_norm), sync
    form.per_replica = tuple(per_replica)
    form.name = type(model).__name__
    return form
