"""Rows run forward on one replica: outputs of the loss become sums, beside the new state.

This room knows models, losses and masks, and nothing of gradients.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jddp.errors import ConfigError
from jddp.modules.batch_norm import Path, settle
from jddp.modules.functional import FlaxModel, name_constants
from jddp.modules.metrics import Mean, Metric, Sums, mask_in, weigh
from jddp.modules.rows import count_rows
from jddp.modules.varying import EQUAL, VARYING, find_varying
from jddp.typing import Batch, LossFn, ModelState, Params, PyTree

_NUMBERS = jax.Array | np.ndarray | np.generic | float | int


def run_forward(
    model: FlaxModel,
    loss_fn: LossFn,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    key: Array,
    constants: PyTree,
    *,
    train: bool,
    valid: Array | None = None,
) -> tuple[Float[Array, ""], tuple[Sums, ModelState]]:
    """The loss of one replica, summed over its valid entries, with all sums and the new state.

    Args:
      model: The model.
      loss_fn: The loss.
      params: The parameters.
      model_state: All other state of the model.
      batch: This replica's rows.
      key: Key of the random numbers.
      constants: Constants of the loss; None for none.
      train: Whether the model trains, or is evaluated.
      valid: Array with 0 for a row of padding, else 1; None where there is no padding.

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
    mask, num_rows = mask_of(batch, valid), count_rows(batch)
    sums = weigh(losses, metrics, mask=mask, num_rows=num_rows, train=train)
    return sums["loss"].total, (sums, model_state)


def run_and_settle(
    model: FlaxModel, loss_fn: LossFn, params: Params, model_state: ModelState, *inputs: PyTree
) -> tuple[Float[Array, ""], tuple[Sums, ModelState]]:
    """`run_forward` in training, with the new state synchronized over the replicas.

    Raises:
      ConfigError: If state depends on a replica's rows, and no rule is declared for it.
    """
    run = functools.partial(run_forward, model, loss_fn, train=True)
    if not jax.tree.leaves(model_state) or model.sync.num_replicas == 1:
        return run(params, model_state, *inputs)
    evaluate, labels = trace_state(model, run, params, model_state, *inputs)
    loss, (sums, new) = evaluate()
    return loss, (sums, settle(model_state, new, labels, model, mask_in(inputs[0])))


def trace_state(
    model: FlaxModel, run: Callable[..., Any], params: Params, model_state: ModelState, *inputs: Any
) -> tuple[Callable[[], Any], PyTree]:
    """Traces `run`, for rows, a key, and constants.

    Returns:
      A function that evaluates it, and labels of `jddp.modules.varying` for the new state.
    """

    def label(path: Path, x: Any) -> int:
        return VARYING if model.keeps_own(path, x) else EQUAL

    *own, constants = inputs
    labels = (
        jax.tree.map(lambda _: EQUAL, params),
        jax.tree_util.tree_map_with_path(label, model_state),
        jax.tree.map(lambda _: VARYING, own),
        jax.tree.map(lambda _: EQUAL, constants),
    )
    given = (params, model_state, *inputs)
    evaluate, (_, (_, found)) = find_varying(run, given, labels, model.sync.axis)
    return evaluate, found


def _losses_and_metrics(outputs: Any, rows: int) -> tuple[Any, Mapping[str, Any]]:
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2
    losses, metrics = outputs if is_pair else (outputs, {})
    if not (isinstance(losses, _NUMBERS | Mean) and isinstance(metrics, Mapping)):
        both = losses, metrics
        kinds = ["array" if isinstance(x, _NUMBERS) else type(x).__name__ for x in both]
        returned = kinds if is_pair else kinds[0]
        raise ConfigError(
            f"loss_fn returned {returned}. Return losses, an array of shape (rows, ...) or a "
            "scalar, or a jddp.Mean; alone, or as (losses, metrics) with a dict of such arrays."
        )
    for name, values in {"loss": losses, **metrics}.items():
        if not isinstance(values, _NUMBERS | Mean | Metric):
            raise ConfigError(
                f"loss_fn returned metric {name!r} of {type(values).__name__}. Return an array "
                "with a value per row, a scalar, a jddp.Mean or a jddp.Metric."
            )
        for shape in map(jnp.shape, jax.tree.leaves(values)):
            if shape and shape[0] != rows:
                raise ConfigError(
                    f"loss_fn returned {name!r} of shape {shape} for {rows} rows. Return one value "
                    "per row (or per token of each row), or a scalar."
                )
    return losses, metrics


def mask_of(batch: Batch, valid: Array | None) -> Any:
    """The user's mask, without the rows of padding; None where all entries count."""
    mask = mask_in(batch)
    if mask is None or valid is None:
        return valid if mask is None else mask
    return mask.astype(jnp.float32) * jnp.expand_dims(valid, tuple(range(1, mask.ndim)))
