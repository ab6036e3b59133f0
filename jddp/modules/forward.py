"""Rows run forward on one replica: outputs of the loss become sums, and replicas agree on state.

The program shows which state of a model depends on the rows of a replica, for any kind of layer.
A value varies if rows, or a random key, of one replica reach it through the equations, or the
number of the replica does. A collective over all replicas, such as `lax.psum`, makes its results
equal again. An equal value may be taken for varying; never the reverse.

This room knows models, losses and masks, and nothing of gradients.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Array, Float

from jddp.ground.errors import ConfigError
from jddp.ground.jaxprs import axes_of, follow
from jddp.ground.typing import Batch, LossFn, ModelState, Params, Path, PyTree, Shaped, Tree
from jddp.modules.base import STATISTICS, FlaxModel, name_arguments
from jddp.modules.batch_norm import Sync
from jddp.modules.metrics import Mean, Metric, Sums, mask_in, weigh
from jddp.modules.rows import count_rows

EQUAL, GROUPED, VARYING = range(3)
# Collectives whose results are equal on all replicas.
EQUALISING = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def find_varying(
    run: Callable[..., Tree], given: Sequence[PyTree], labels: Sequence[PyTree], axis: str
) -> tuple[Callable[[], Tree], Tree]:
    """Finds the results of a function of arrays that vary.

    Args:
      run: Function of trees of arrays that returns a tree of arrays; traced once.
      given: Arguments of the function.
      labels: EQUAL or VARYING, for each leaf of `given`.
      axis: Name of the mapped axis.

    Returns:
      A function that evaluates the traced program for `given`; and a label for each result. GROUPED
      labels a result that is equal within groups of replicas.
    """
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(*given)
    like_results = functools.partial(jax.tree.unflatten, jax.tree.structure(shapes))

    def evaluate() -> Tree:
        leaves = jax.tree.leaves(tuple(given))
        return like_results(jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *leaves))

    equalize = functools.partial(_equalize, axis=axis)
    found = follow(traced.jaxpr, jax.tree.leaves(tuple(labels)), equalize)
    return evaluate, like_results(found)


def _equalize(eqn: JaxprEqn, given: list[int], axis: str) -> list[int] | None:
    if axis not in axes_of(eqn):
        return None
    label = VARYING
    if eqn.primitive.name in EQUALISING:
        label = EQUAL if eqn.params.get("axis_index_groups") is None else GROUPED
    return [label] * len(eqn.outvars)


# The loss of a replica, summed over its valid entries; all sums, and the new state.
LossAndState = tuple[Float[Array, ""], tuple[Sums, ModelState]]
Forward = Callable[..., LossAndState]
_NUMBERS = jax.Array | np.ndarray | np.generic | float | int
SYNC = "sync_state"  # The scope of the equations by which replicas agree on state.


def run_forward(
    model: FlaxModel,
    loss_fn: LossFn,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    key: Array,
    constants: PyTree,
    valid: Array | None = None,
) -> LossAndState:
    """The loss of one replica, summed over its valid entries, with all sums and the new state.

    The model is evaluated where rows may be padding, and trains where none can be.

    Args:
      model: The model.
      loss_fn: The loss.
      params: The parameters.
      model_state: All other state of the model.
      batch: This replica's rows.
      key: Key of the random numbers.
      constants: Constants of the loss; None for none.
      valid: Array with 0 for a row of padding and 1 for any other; None in training.

    Raises:
      ConfigError: If the loss or a metric has another number of rows.
    """
    train, loss_fn = valid is None, name_arguments(loss_fn, constants, key)
    arguments = (*model.whole(params, model_state), batch, key)
    if train:
        outputs, written = model.train(loss_fn, *arguments)
        model_state = {**model_state, **written}
    else:
        outputs = model.evaluate(loss_fn, *arguments)
    num_rows = count_rows(batch)
    losses, metrics = _losses_and_metrics(outputs, num_rows, train=train)
    sums = weigh(losses, metrics, mask=mask_of(batch, valid), num_rows=num_rows, train=train)
    return sums["loss"].total, (sums, model_state)


def run_and_settle(
    model: FlaxModel, loss_fn: LossFn, params: Params, model_state: ModelState, *inputs: PyTree
) -> LossAndState:
    """`run_forward` in training, with the new state synchronized over the replicas.

    Raises:
      ConfigError: If state depends on a replica's rows, and no rule is declared for it.
    """
    run: Forward = functools.partial(run_forward, model, loss_fn)
    if not jax.tree.leaves(model_state) or model.sync.num_replicas == 1:
        return run(params, model_state, *inputs)
    evaluate, labels = trace_state(model, run, params, model_state, *inputs)
    loss, (sums, new) = evaluate()
    with jax.named_scope(SYNC):
        return loss, (sums, settle(model_state, new, labels, model, mask_in(inputs[0])))


def trace_state(
    model: FlaxModel, run: Forward, params: Params, model_state: ModelState, *inputs: PyTree
) -> tuple[Callable[[], LossAndState], ModelState]:
    """Traces `run`, for rows, a key, and constants.

    Returns:
      A function that evaluates it, and a label for each leaf of the new state.
    """

    def label(path: Path, x: Shaped) -> int:
        return VARYING if model.keeps_own(path, x) else EQUAL

    *own, constants = inputs
    labels = (
        jax.tree.map(lambda _: EQUAL, params),
        jax.tree_util.tree_map_with_path(label, model_state),
        *jax.tree.map(lambda _: VARYING, own),
        jax.tree.map(lambda _: EQUAL, constants),
    )
    given = (params, model_state, *inputs)
    evaluate, (_, (_, found)) = find_varying(run, given, labels, model.sync.axis)
    return evaluate, found


def settle(
    old: ModelState, new: ModelState, labels: PyTree, model: FlaxModel, mask: Array | None
) -> ModelState:
    """Synchronizes the state, other than parameters, that a model has written.

    State that does not depend on a replica's rows is equal already: counts of steps, statistics of
    weights, and batch statistics of synced layers. Batch statistics of groups are averaged.
    Per-replica state is left alone. The rest is combined by the declared rules. Without a rule,
    "broadcast" takes the batch statistics of replica 0, like DDP's `broadcast_buffers`. With a mask
    it takes the statistics of the first replica that has a valid row, and without any such row they
    stay. Each micro-batch chooses its replica.

    Args:
      old: State before the model ran.
      new: State after it.
      labels: Label of each leaf: EQUAL, GROUPED or VARYING.
      model: The model, for the rule of each leaf.
      mask: The mask of this replica's rows, or None.

    Raises:
      ConfigError: If a leaf differs per replica, and no rule is declared for it.
    """
    sync = model.sync
    # Logical replicas run one after the other: their values are combined at the end of the step.
    is_late = sync.logical_replicas is not None
    source: Array | int = 0
    if model.batch_norm == "broadcast" and mask is not None:
        here = jnp.where(
            (mask > 0).any(), jax.lax.axis_index(sync.axis), jax.lax.axis_size(sync.axis)
        )
        source = jax.lax.pmin(here, sync.axis)

    def agree(path: Path, before: Array, after: Array, label: int) -> Array:
        if label == EQUAL or model.keeps_own(path, after):
            return after
        kinds = model.kinds_at(path)
        if rule := sync.rule(kinds):
            return after if is_late else combine(path, rule, before, after[None], sync)
        is_statistic = not STATISTICS.isdisjoint(kinds)
        if is_statistic and model.batch_norm == "broadcast":
            is_source = jax.lax.axis_index(sync.axis) == source
            chosen = jax.lax.psum(jnp.where(is_source, after, 0), sync.axis)
            return jnp.where(source < jax.lax.axis_size(sync.axis), chosen, before)
        if is_statistic and label == GROUPED:
            return jax.lax.pmean(after, sync.axis)
        raise _undeclared(path, [*kinds, ""][0], is_statistic=is_statistic)

    return jax.tree_util.tree_map_with_path(agree, old, new, labels)


def _undeclared(path: Path, kind: str, *, is_statistic: bool) -> ConfigError:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if is_statistic:
        return ConfigError(
            f"batch_norm='sync': {name!r} is a statistic of each replica's own rows, and its layer "
            "is neither Flax's BatchNorm nor has it a field axis_name. Register the layer's class, "
            "jddp.register_batch_norm(cls), so that it sees the rows of all replicas; or choose "
            "batch_norm='local', of which jddp.verify shows how far it is from one device."
        )
    return ConfigError(
        f"state: {name!r} depends on the rows or random numbers of each replica, and no rule is "
        f"declared for {kind!r}. Declare state={{{kind!r}: 'sum'}}, 'mean' or 'first' (replica "
        "0's); or 'per_replica', with which each keeps its own."
    )


def combine(path: Path, rule: str, before: Array, rows: Array, sync: Sync) -> Array:
    """Combines the values of all replicas by a rule.

    Args:
      path: Path of the leaf.
      rule: One of `REDUCTIONS`.
      before: The value before the step, equal on all replicas.
      rows: The values of the replicas of this device, in rows; several for logical replicas.
      sync: Replicas whose values are combined.

    Raises:
      ConfigError: If the rule does not fit the dtype of the leaf.
    """
    if rule == "first":
        return jax.lax.all_gather(rows[0], sync.axis)[0]
    if not jnp.issubdtype(rows.dtype, jnp.number if rule == "sum" else jnp.inexact):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise ConfigError(
            f"state: the rule {rule!r} does not fit {name!r} of {rows.dtype}: a mean is of "
            "floating values, a sum of numbers. Choose 'sum' or 'first'."
        )
    if rule == "sum":
        return before + sync.add(rows - before[None])
    return (sync.add(rows) / sync.num_replicas).astype(rows.dtype)


def _losses_and_metrics(outputs: Any, rows: int, *, train: bool) -> tuple[Any, Mapping[str, Any]]:
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2
    losses, metrics = outputs if is_pair else (outputs, {})
    if not (isinstance(losses, _NUMBERS | Mean) and isinstance(metrics, Mapping)):
        kind = ["array" if isinstance(x, _NUMBERS) else type(x).__name__ for x in (losses, metrics)]
        raise ConfigError(
            f"loss_fn returned {kind if is_pair else kind[0]}. Return losses, an array of shape "
            "(rows, ...), a scalar or a jddp.Mean; alone, or as (losses, metrics) with a dict."
        )
    if train and not jnp.issubdtype(jnp.result_type(jax.tree.leaves(losses)[0]), jnp.inexact):
        raise ConfigError("loss_fn returned whole numbers, which have no gradient. Return floats.")
    for name, values in {"loss": losses, **metrics}.items():
        if not (isinstance(name, str) and isinstance(values, _NUMBERS | Mean | Metric)):
            raise ConfigError(
                f"loss_fn returned metric {name!r} of {type(values).__name__}. Return, by names of "
                "text, arrays with a value per row, scalars, a jddp.Mean or a jddp.Metric."
            )
        for x in jax.tree.leaves(values):
            if jnp.iscomplexobj(x):  # Its imaginary part would be lost.
                raise ConfigError(
                    f"loss_fn returned {name!r} of {jnp.result_type(x)}; losses and metrics are "
                    "real. Return jnp.abs(x) ** 2, x.real or x.imag."
                )
            if jnp.ndim(x) and len(x) != rows:
                raise ConfigError(
                    f"loss_fn returned {name!r} of shape {x.shape} for {rows} rows. Return one "
                    "value per row (or per token of each row), or a scalar."
                )
    return losses, metrics


def mask_of(batch: Batch, valid: Array | None) -> Any:
    """The user's mask, without the rows of padding; None if all entries count."""
    mask = mask_in(batch)
    if mask is None or valid is None:
        return valid if mask is None else mask
    return mask.astype(jnp.float32) * jnp.expand_dims(valid, tuple(range(1, mask.ndim)))
