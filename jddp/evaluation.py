"""Means over every example exactly once, however their number divides.

    metrics = evaluate_exactly(run, batches, mesh)

What does not fill the devices is padded with rows that count for nothing. Sums and counts leave
the devices; they are added up on the host in float64, so that counts stay whole numbers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jddp.errors import UsageError
from jddp.mesh import as_arrays, count_rows, from_all_processes, put_rows
from jddp.metrics import Sums, Totals

PyTree = Any


def evaluate_exactly(
    run: Callable[[PyTree, Any], Sums], batches: Iterable[PyTree], mesh: Mesh
) -> dict[str, Any]:
    """Returns the means of what `run` sums, over all rows of `batches`.

    Args:
      run: `run(batch, valid)` over the mesh; `valid` is 1 for a row that counts.
      batches: This process's, of any size, also empty; as many on every process.
      mesh: The mesh of devices.

    Raises:
      UsageError: If a scalar meets rows of padding, or there is no batch.
    """
    totals, waiting, room = Totals(), None, 0
    for batch in map(as_arrays, batches):
        rows = from_all_processes(count_rows(batch))
        fitting = _round_up(int(rows.max()), len(mesh.local_devices))
        # A ragged batch takes the room of a full one, which is compiled already.
        room = fitting if (rows == fitting).all() else max(room, fitting)
        padded, valid = pad_rows(batch, room)
        sums = run(*put_rows((padded, valid), mesh))
        if (rows != room).any():
            _refuse_scalars(sums, int(rows.min()), room)
        if waiting is not None:
            totals.add(waiting)  # one batch late, so that the devices never wait
        waiting = sums
    if waiting is None:
        raise UsageError("evaluate was given no batches. Was the iterator used up before?")
    totals.add(waiting)
    return totals.values()


def pad_rows(batch: PyTree, room: int) -> tuple[PyTree, np.ndarray]:
    """Fills a batch up to `room` rows with copies of its first; also returns which rows count."""
    rows = count_rows(batch)
    valid = (np.arange(room) < rows).astype(np.float32)
    if rows == room:
        return batch, valid

    def pad(x: Any) -> np.ndarray:
        x = np.asarray(x)
        filler = x[:1] if rows else np.zeros((1, *x.shape[1:]), x.dtype)
        return np.concatenate([x, np.repeat(filler, room - rows, axis=0)])

    return jax.tree.map(pad, batch), valid


def _round_up(rows: int, num_devices: int) -> int:
    return max(1, math.ceil(rows / num_devices)) * num_devices


def refuse_padding(scalars: Sequence[str], num_parts: int) -> None:
    """Refuses to train on padded batches with a loss or metric that is a scalar.

    Args:
      scalars: The scalars, by name.
      num_parts: What a global batch size is a multiple of, if it needs no padding.

    Raises:
      UsageError: If there is one.
    """
    for name in scalars:
        raise UsageError(
            f"{name!r} is a scalar, so rows of padding cannot be kept out of it. Return one value "
            "per row, or let batches be full: a global batch size that is a multiple of "
            f"{num_parts}, drop_remainder=True."
        )


def _refuse_scalars(sums: Sums, rows: int, room: int) -> None:
    for name, x in sums.items():
        if x.is_scalar:
            raise UsageError(
                f"{name!r} is a scalar, so padding cannot be kept out of it, and {rows} rows do "
                f"not fill {room}. Return one value per row, or give batches that divide."
            )
