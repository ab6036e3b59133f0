"""Means over every example exactly once, or what each of them gives, however their number divides.

    metrics = evaluate_exactly(run, batches, mesh, num_shares)
    outputs = predict_rows(run, batches, mesh)

What does not fill the devices is padded with rows that count for nothing. Sums and counts leave
the devices; they are added up on the host in float64, so that counts stay whole numbers.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jddp.engine.mesh import as_arrays, from_all_processes, put_rows
from jddp.errors import UsageError
from jddp.modules.metrics import Sums, Totals
from jddp.modules.rows import count_rows
from jddp.typing import Batch, Batches, Metrics, PyTree


def evaluate_exactly(
    run: Callable[[Batch, Any], Sums], batches: Batches, mesh: Mesh, num_shares: int
) -> Metrics:
    """Returns the means of what `run` sums, over all rows of `batches`.

    Args:
      run: `run(batch, valid)` over the mesh; `valid` is 1 for a row that counts.
      batches: This process's, of any size, also empty; as many on every process.
      mesh: The mesh of devices.
      num_shares: Into which the rows of this process are split.

    Raises:
      UsageError: If a scalar meets rows of padding, or there is no batch.
    """
    totals, waiting = Totals(), None
    for sums in sums_of(run, batches, mesh, num_shares):
        if waiting is not None:
            totals.add(waiting)  # one batch late, so that the devices never wait
        waiting = sums
    if waiting is None:
        raise UsageError("evaluate was given no batches. Was the iterator used up before?")
    totals.add(waiting)
    return totals.values()


def sums_of(
    run: Callable[[Batch, Any], Sums], batches: Batches, mesh: Mesh, num_shares: int
) -> Iterator[Sums]:
    """What `run` sums for each batch, or their shapes; refuses as `evaluate_exactly`."""
    for placed in _place(batches, mesh, num_shares):
        sums = run(placed.rows, placed.valid)
        if placed.fewest < placed.room:
            instead = f"give batches that divide: {placed.fewest} rows do not fill {placed.room}"
            refuse_padding(sums, instead)
        yield sums


def predict_rows(run: Callable[[Batch, Any], PyTree], batches: Batches, mesh: Mesh) -> PyTree:
    """Returns what `run` gives for all rows of `batches` of this process, in their order.

    Args:
      run: `run(batch, valid)` over the mesh gives a tree of arrays with the rows of the batch.
      batches: This process's, of any size; as many on every process.
      mesh: The mesh of devices.

    Returns:
      The tree, of numpy arrays.

    Raises:
      UsageError: If there is no batch.
    """
    found = [
        jax.tree.map(lambda x, n=placed.num_rows: _own_rows(x)[:n], run(placed.rows, placed.valid))
        for placed in _place(batches, mesh, len(mesh.local_devices))
    ]
    if not found:
        raise UsageError("predict was given no batches. Was the iterator used up before?")
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def _own_rows(x: jax.Array) -> np.ndarray:
    """The rows that lie on this process's devices."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


class _Placed(NamedTuple):
    """A batch on the devices, filled up.

    Attributes:
      rows: Of all processes.
      valid: 1 for a row that counts.
      num_rows: Of this process, those that count.
      fewest: The same of the process that has fewest.
      room: Rows of each process, padding included.
    """

    rows: Batch
    valid: jax.Array
    num_rows: int
    fewest: int
    room: int


def _place(batches: Batches, mesh: Mesh, num_shares: int) -> Iterator[_Placed]:
    room = 0
    for batch in map(as_arrays, batches):
        num_rows = count_rows(batch)
        rows = from_all_processes(num_rows)
        fitting = max(1, math.ceil(rows.max() / num_shares)) * num_shares
        # A ragged batch takes the room of a full one, which is compiled already.
        room = fitting if (rows == fitting).all() else max(room, fitting)
        placed, valid = put_rows(pad_rows(batch, room), mesh)
        yield _Placed(placed, valid, num_rows, int(rows.min()), room)


def pad_rows(batch: Batch, room: int) -> tuple[Batch, np.ndarray]:
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


def refuse_padding(sums: Sums, instead: str) -> None:
    """Refuses rows of padding beside a loss or metric that cannot leave them out.

    Args:
      sums: The loss and metrics.
      instead: The way out beside another form of loss.

    Raises:
      UsageError: If there is a scalar, or a `Mean` of scalars.
    """
    for name, x in sums.items():
        if not x.is_maskable:
            raise UsageError(
                f"{name!r} is a scalar, so rows of padding cannot be kept out of it. Return one "
                f"value per row, or a jddp.Mean of totals and counts per row; or {instead}."
            )
