"""Rows of a batch: how many there are, and whether they divide."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from jddp.errors import ConfigError, DataError
from jddp.typing import TRANSFORM, Batch

# Columns of batches that hold no numbers and were left out, and what they hold.
LEFT_OUT: dict[str, str] = {}


def count_rows(batch: Batch) -> int:
    """Rows of a batch: the common first dim of its leaves.

    Raises:
      DataError: If there is no leaf, a leaf has no rows, or leaves differ.
    """
    rows = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(rows) != 1 or () in rows:
        shapes = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.shape(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        }
        raise DataError(f"Every leaf of a batch has the same number of rows first; got {shapes}.")
    return int(next(iter(rows))[0])


def check_rows(rows: int, divisor: int, what: str, called: str = "rows") -> None:
    """Refuses a number of rows, or of `called`, that does not divide; names the nearest that do.

    Raises:
      ConfigError: If `rows` is not a positive multiple of `divisor`.
    """
    if rows == 0 or rows % divisor:
        below = rows // divisor * divisor
        above = math.ceil(max(rows, 1) / divisor) * divisor
        sizes = f"{above}" if below == 0 else f"{below} and {above}"
        raise ConfigError(f"{rows} {called} do not divide over {what}. Nearest that do: {sizes}.")


def split_rows(batch: Batch, num: int) -> Batch:
    """Cuts the rows into `num` equal parts, in order: (num, rows of a part, ...)."""
    # Not -1, which JAX cannot tell from the size of an array without elements.
    return jax.tree.map(lambda x: x.reshape(num, len(x) // num, *x.shape[1:]), batch)


def transformed(batch: Batch) -> Batch:
    """The rows as a loss reads them: passed through the function that a batch may bring along."""
    if not (isinstance(batch, Mapping) and callable(batch.get(TRANSFORM))):
        return batch
    return batch[TRANSFORM]({name: x for name, x in batch.items() if name != TRANSFORM})
