"""Rows of padding: copies of a batch's last row, which are masked out of loss and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jddp.engine.mesh import RowSplit
from jddp.engine.processes import from_all_processes
from jddp.errors import ConfigError, UsageError
from jddp.modules.metrics import Sums
from jddp.modules.rows import check_rows, count_rows
from jddp.typing import Batch


def pad_rows(batch: Batch, room: int) -> tuple[Batch, np.ndarray]:
    """Pads a batch to `room` rows with copies of its last; also returns which rows count."""
    rows = count_rows(batch)
    valid = (np.arange(room) < rows).astype(np.float32)
    if rows == room:
        return batch, valid

    def pad(x: Array | np.ndarray) -> Array | np.ndarray:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x[np.minimum(np.arange(room), rows - 1)]
        widths = [(0, room - rows)] + [(0, 0)] * (x.ndim - 1)
        # By a real row: rows of zeros can make NaN in a model, such as log 0 or 0 / 0.
        return np.pad(x, widths, mode="edge" if rows else "constant")

    return jax.tree.map(pad, batch), valid


def refuse_padding(sums: Sums, instead: str) -> None:
    """Refuses rows of padding beside a loss or metric that cannot leave them out.

    Args:
      sums: Sums of the loss and metrics.
      instead: Other way out, for the message.

    Raises:
      UsageError: If there is a scalar, or a `Mean` of scalars.
    """
    for name, x in sums.items():
        if not x.is_maskable:
            raise UsageError(
                f"{name!r} is a scalar, so rows of padding cannot be kept out of it. Return one "
                f"value per row, or a jddp.Mean of totals and counts per row; or {instead}."
            )


def pad_for_step(batch: Batch, split: RowSplit, sums: Sums, num_rows: int | None = None) -> Batch:
    """Pads this process's rows until they divide, as `jddp.DataParallel.pad` does.

    Args:
      batch: A dict of arrays, as `as_arrays` makes them.
      split: Division of the rows of a step.
      sums: Sums of the loss and metrics, which padding must leave alone.
      num_rows: Number of rows to pad to; by default the next that divides.
    """
    if not isinstance(batch, dict):
        raise ConfigError(f"pad adds 'mask' to a dict of arrays; got {type(batch).__name__}.")
    rows, num_parts = count_rows(batch), split.num_local_micro_batches
    if num_rows is None:
        most = max(1, int(from_all_processes(rows, "pad").max()))
        num_rows = -(-most // num_parts) * num_parts
    check_rows(num_rows, num_parts, f"{num_parts} micro-batches of this process")
    if rows > num_rows:
        raise ConfigError(f"pad: the batch has {rows} rows, more than num_rows={num_rows}.")
    if rows < num_rows:
        refuse_padding(sums, f"give batches of {num_rows} rows")
    padded, valid = pad_rows(batch, num_rows)
    mask = np.asarray(padded.get("mask", valid), np.float32)
    return {**padded, "mask": mask * np.expand_dims(valid, tuple(range(1, mask.ndim)))}
