"""Whether a layer that averages over replicas is, over replicas, the layer of one device.

A layer that is given the axis of the replicas averages its statistics over them by itself. For a
batch norm that is the batch norm of all rows. A layer that normalizes groups of its rows (ghost, or
virtual, batch norm) would average the groups of one replica with those of others: another model,
whose statistics are the same on all replicas, so that nothing else shows it.

So such a layer is run by itself, once, on random rows: on all of them, and on the rows of each
replica under `vmap(axis_name=...)`. Both must agree. One row is an outlier, which doubles the
variance of all rows, and of a group far more or not at all. That costs a compilation of the layer
on one device, for each form of the layer and its inputs, while a step is traced.
"""

import functools
import math
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jddp.errors import ConfigError
from jddp.modules.batch_norm import Sync
from jddp.modules.rows import split_rows
from jddp.typing import Batch, PyTree

# `run(axis_name, state, args, kwargs)` returns the outputs of a layer and its new statistics.
CallOnRows = Callable[[str | None, PyTree, Any, Any], tuple[PyTree, PyTree]]

# Entries in the rows of all replicas; with more than this, two replicas stand for all.
_MOST_ENTRIES = 2**24
_ALLOWED = 0.05  # of a norm: far more than roundings, far less than what an outlier makes
_COMPARED: dict[Hashable, bool] = {}


class _Inputs(NamedTuple):
    """Arguments of a call: arrays with a row for each example, other arrays, and the rest."""

    rows: list[Any]
    others: list[Any]
    restore: Callable[[list[Any], list[Any]], Any]
    form: Hashable


def check_all_rows(
    what: str, run: CallOnRows, form: Hashable, state: PyTree, given: tuple[Any, Any], sync: Sync
) -> None:
    """Refuses a layer whose statistics, averaged over replicas, are not those of all its rows.

    Args:
      what: Name of the layer, for the message.
      run: Function that runs the layer by itself.
      form: Class and options of the layer; layers of the same form are compared once.
      state: State of the layer, for its shapes and dtypes.
      given: Arguments of the call, for theirs.
      sync: Replicas whose statistics are taken together.

    Raises:
      ConfigError: If the layer is another one over several replicas.
    """
    num = sync.num_replicas
    inputs = _split(given)
    if num == 1 or not inputs.rows:
        return
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), state)
    key = form, num, sync.axis, inputs.form, str(shapes)
    if key not in _COMPARED:
        _COMPARED[key] = _agrees(run, state, inputs, num, sync.axis)
    if not _COMPARED[key]:
        raise ConfigError(
            f"batch_norm='sync': {what} has a field axis_name, and does not normalize by the "
            "statistics of all its rows, but of groups of them, for instance. Averaged over "
            "replicas it would be another model. Choose batch_norm='local': each replica "
            "normalizes its own rows, which is exact where a group lies on one replica; or "
            "register its class, jddp.register_batch_norm(cls), to have the rows of all."
        )


def _split(given: Any) -> _Inputs:
    leaves, treedef = jax.tree.flatten(given)
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    num = next((len(x) for x, ok in zip(leaves, is_array, strict=True) if ok and x.ndim), 0)
    is_row = [ok and x.shape[:1] == (num,) for x, ok in zip(leaves, is_array, strict=True)]

    def restore(rows: list[Any], others: list[Any]) -> Any:
        left = iter(rows), iter(others)
        filled = [
            next(left[0]) if row else next(left[1]) if array else x
            for x, row, array in zip(leaves, is_row, is_array, strict=True)
        ]
        return jax.tree.unflatten(treedef, filled)

    told = tuple(
        (x.shape, str(x.dtype)) if ok else repr(x) for x, ok in zip(leaves, is_array, strict=True)
    )
    rows = [x for x, row in zip(leaves, is_row, strict=True) if row]
    others = [x for x, row, ok in zip(leaves, is_row, is_array, strict=True) if ok and not row]
    return _Inputs(rows, others, restore, (treedef, told))


def _agrees(run: CallOnRows, state: PyTree, inputs: _Inputs, num: int, axis: str) -> bool:
    """Whether a layer gives on all rows what it gives over replicas; True where it cannot tell."""
    num = num if num * max(math.prod(x.shape) for x in inputs.rows) <= _MOST_ENTRIES else 2
    rng = np.random.default_rng(0)
    values = jax.tree.map(functools.partial(_like, rng), (state, inputs.others))
    rows = [_outlying(rng, x, num) for x in inputs.rows]

    def both(values: tuple[PyTree, list[Any]], rows: Batch) -> PyTree:
        def call(axis: str | None, rows: Batch) -> tuple[PyTree, PyTree]:
            return run(axis, values[0], *inputs.restore(rows, values[1]))

        apart = jax.vmap(functools.partial(call, axis), axis_name=axis)
        return call(None, rows), apart(split_rows(rows, num))

    try:
        # The layer is met while a step is traced, and Flax intercepts its calls; neither is so in
        # another thread, where numbers are concrete.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(lambda: jax.device_get(jax.jit(both)(values, rows))).result()
    except Exception:
        # A layer that does not run by itself, or not on so many rows: `verify` compares the model.
        return True
    (wanted, kept), (outputs, own) = found
    if not all(_is_close(x, np.broadcast_to(x[:1], x.shape)) for x in jax.tree.leaves(own)):
        return True  # It has not asked for the axis, and is refused for that.
    kept_here = jax.tree.map(lambda x: x[0], own)
    outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
    pairs = zip(jax.tree.leaves((outputs, kept_here)), jax.tree.leaves((wanted, kept)), strict=True)
    return all(_is_close(x, y) for x, y in pairs)


def _like(rng: np.random.Generator, x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return rng.uniform(0.5, 1.5, x.shape).astype(x.dtype)  # which a variance may be too
    return np.ones(x.shape, x.dtype)


def _outlying(rng: np.random.Generator, x: Any, num: int) -> np.ndarray:
    shape = (num * x.shape[0], *x.shape[1:])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.ones(shape, x.dtype)
    rows = rng.normal(size=shape)
    rows[0] += math.sqrt(len(rows))
    return rows.astype(x.dtype)


def _is_close(x: np.ndarray, y: np.ndarray) -> bool:
    if x.shape != y.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        return x.shape == y.shape
    difference, size = (np.linalg.norm(np.asarray(z, np.float64)) for z in (x - y, y))
    return bool(difference <= _ALLOWED * size)
