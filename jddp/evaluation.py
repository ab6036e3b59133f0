"""Means over every example exactly once, or what each of them gives, however their number divides.

    metrics = evaluate_exactly(run, batches, mesh, num_shares)
    outputs = predict_rows(run, batches, mesh)

What does not fill the devices is padded with rows that count for nothing. Sums and counts leave
the devices; they are added up on the host in float64, so that counts stay whole numbers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jddp.errors import UsageError
from jddp.mesh import as_arrays, count_rows, from_all_processes, put_rows
from jddp.metrics import Sums, Totals

PyTree = Any


def evaluate_exactly(
    run: Callable[[PyTree, Any], Sums], batches: Iterable[PyTree], mesh: Mesh, num_shares: int
) -> dict[str, Any]:
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
    for placed in _place(batches, mesh, num_shares):
        sums = run(placed.rows, placed.valid)
        if placed.fewest < placed.room:
            _refuse_scalars(sums, placed.fewest, placed.room)
        if waiting is not None:
            totals.add(waiting)  # one batch late, so that the devices never wait
        waiting = sums
    if waiting is None:
        raise UsageError("evaluate was given no batches. Was the iterator used up before?")
    totals.add(waiting)
    return totals.values()


def predict_rows(
    run: Callable[[PyTree, Any], PyTree], batches: Iterable[PyTree], mesh: Mesh
) -> PyTree:
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

    rows: PyTree
    valid: jax.Array
    num_rows: int
    fewest: int
    room: int


def _place(batches: Iterable[PyTree], mesh: Mesh, num_shares: int) -> Iterator[_Placed]:
    room = 0
    for batch in map(as_arrays, batches):
        num_rows = count_rows(batch)
        rows = from_all_processes(num_rows)
        fitting = _round_up(int(rows.max()), num_shares)
        # A ragged batch takes the room of a full one, which is compiled already.
        room = fitting if (rows == fitting).all() else max(room, fitting)
        placed, valid = put_rows(pad_rows(batch, room), mesh)
        yield _Placed(placed, valid, num_rows, int(rows.min()), room)


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


def _round_up(rows: int, num_shares: int) -> int:
    return max(1, math.ceil(rows / num_shares)) * num_shares


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
