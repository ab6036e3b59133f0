"""Linen and NNX modules in one functional form: parameters, other state, and a run of the loss.

    model = functional(module, batch_norm, sync, state, frozen, compute_dtype)
    params, model_state = model.init(loss_fn, key, batch)
    outputs, model_state = model.train(loss_fn, params, model_state, batch, key)

Both are nested dicts of plain arrays, so that no module is on the hot path. A loss is
`loss_fn(model, batch, train)`; its `model` is a bound Linen module, or an NNX module in train or
eval mode.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jddp.ground.errors import ConfigError
from jddp.modules.base import FlaxModel, Frozen
from jddp.modules.batch_norm import Sync
from jddp.modules.linen import LinenModel, synced_linen
from jddp.modules.nnx import NnxModel, sync_nnx

REDUCTIONS = ("mean", "sum", "first")
OWN = "per_replica"


def functional(
    model: Any,
    batch_norm: str,
    sync: Sync,
    state: Mapping[str, str] | None,
    frozen: Frozen,
    compute_dtype: str | None,
) -> FlaxModel:
    """Returns the functional form of a Linen or NNX module; `FlaxModel` describes the options.

    Raises:
      ConfigError: If `model` is neither, or a rule of `state` is unknown.
    """
    rules = dict(state or {})
    for kind, rule in rules.items():
        if rule not in (*REDUCTIONS, OWN):
            raise ConfigError(
                f"state={{{kind!r}: {rule!r}}}: replicas agree by one of {list(REDUCTIONS)}, or "
                f"each keeps its own: {OWN!r}. Choose one of these."
            )
    form: FlaxModel
    if isinstance(model, nn.Module):
        form = LinenModel(model)
    elif isinstance(model, nnx.Module):
        form = NnxModel(model)
    else:
        raise _no_module(model)
    declared = tuple((kind, rule) for kind, rule in rules.items() if rule != OWN)
    form.batch_norm = batch_norm
    form.sync = dataclasses.replace(sync, rules=declared)
    form.per_replica = tuple(kind for kind, rule in rules.items() if rule == OWN)
    form.compute_dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    form.frozen = [frozen] if isinstance(frozen, str) else frozen
    form.name = type(model).__name__
    return form


def _no_module(model: object) -> ConfigError:
    what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    return ConfigError(
        f"model is {what}. Give an instance of flax.linen.Module or flax.nnx.Module; wrap a "
        "function, or another library's model, in a Linen module of one parameter."
    )


def sync_batch_norm(model: Any, axis: str = "data") -> Any:
    """Returns a model whose batch norms take the statistics of all replicas, for your own step.

    It is the counterpart of PyTorch's `convert_sync_batchnorm`. `jddp.DataParallel` does it by
    itself.

    Args:
      model: A Linen module, whose `apply` is synchronized; or an NNX module, which is copied.
      axis: Name of the axis of the `pmap` or `shard_map` in which it trains.

    Raises:
      ConfigError: If it is neither.
    """
    sync = Sync(axis)
    if isinstance(model, nnx.Module):
        copy = nnx.clone(model)
        sync_nnx(copy, sync)
        return copy
    if not isinstance(model, nn.Module):
        raise _no_module(model)

    class Synced(type(model)):  # type: ignore[misc]  # The base is known only at run time.
        @nn.nowrap
        def apply(self, *args: object, **kwargs: object) -> object:
            with synced_linen(sync):
                return super().apply(*args, **kwargs)

    Synced.__name__ = type(model).__name__
    Synced.__qualname__ = type(model).__qualname__
    names = [field.name for field in dataclasses.fields(model) if field.init]
    return Synced(**{name: getattr(model, name) for name in names if name != "parent"})
