"""Rows run forward on one replica: what the loss returns becomes sums, beside the new state.

This room knows models, losses and masks, and nothing of gradients.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jddp.errors import ConfigError
from jddp.flaxmodel import FlaxModel, LossFn, name_constants
from jddp.mesh import count_rows
from jddp.metrics import Metric, Sums, weigh

PyTree = Any
_NUMBERS = jax.Array | np.ndarray | np.generic | float | int


def run_forward(
    model: FlaxModel,
    loss_fn: LossFn,
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: Array,
    constants: PyTree,
    *,
    train: bool,
    valid: Array | None = None,
) -> tuple[Float[Array, ""], tuple[Sums, PyTree]]:
    """The loss of one replica, summed over its valid entries, with all sums and the new state.

    Args:
      model: The model.
      loss_fn: The loss.
      params: The parameters.
      model_state: All other state of the model.
      batch: This replica's rows.
      key: Of the random numbers.
      constants: What the loss is handed as `constants`; None for nothing.
      train: Whether the model trains, or is evaluated.
      valid: 0 for a row of padding; None where there is none.

    Raises:
      ConfigError: If the loss or a metric has another number of rows.
    """
    loss_fn = name_constants(loss_fn, constants)
    arguments = (params, model_state, batch, key)
    if train:
        outputs, model_state = model.train(loss_fn, *arguments)
    else:
        outputs = model.evaluate(loss_fn, *arguments)
    losses, metrics = _losses_and_metrics(outputs, count_rows(batch))
    # In evaluation batches may differ in size, so a scalar, a mean over its rows, weighs by them.
    sums = weigh(
        losses,
        metrics,
        mask=mask_of(batch, valid),
        scalar_count=1.0 if train else float(count_rows(batch)),
        train=train,
    )
    return sums["loss"].total, (sums, model_state)


def _losses_and_metrics(outputs: Any, rows: int) -> tuple[Any, Mapping[str, Any]]:
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2
    losses, metrics = outputs if is_pair else (outputs, {})
    if not (isinstance(losses, _NUMBERS) and isinstance(metrics, Mapping)):
        returned = [type(x).__name__ for x in outputs] if is_pair else type(outputs).__name__
        raise ConfigError(
            f"loss_fn returned {returned}. Return losses, an array of shape (rows, ...) or a "
            "scalar; alone, or as (losses, metrics) with a dict of such arrays."
        )
    for name, values in {"loss": losses, **metrics}.items():
        if not isinstance(values, _NUMBERS | Metric):
            raise ConfigError(
                f"loss_fn returned metric {name!r} of {type(values).__name__}. Return an array "
                "with a value per row, a scalar, or a jddp.Metric."
            )
        for shape in map(jnp.shape, jax.tree.leaves(values)):
            if shape and shape[0] != rows:
                raise ConfigError(
                    f"loss_fn returned {name!r} of shape {shape} for {rows} rows. Return one value "
                    "per row (or per token of each row), or a scalar."
                )
    return losses, metrics


def mask_of(batch: PyTree, valid: Array | None) -> Any:
    """The user's mask, without the rows of padding; None where all counts."""
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    if mask is None or valid is None:
        return valid if mask is None else mask
    return mask.astype(jnp.float32) * jnp.expand_dims(valid, tuple(range(1, mask.ndim)))
