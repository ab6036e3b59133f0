"""Rows of a batch: made arrays that a device can hold, counted, and divided.

    batch = as_arrays({"image": tensor, "name": ["cat", "dog"], "id": ids})   # without "name"

Anything that numpy can convert becomes an array. A column of a dict that holds no numbers is left
out, with one notice, since most losses do not read it. A loss that reads it is refused when it is
traced (`modules.base.call_loss`). The function under "transform" stays: a step applies it to its
rows. Whole numbers that JAX would cut to 32 bits are refused, and so are weights that are given as
a mask.
"""

import logging
import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jddp.ground.errors import ConfigError, DataError
from jddp.ground.typing import TRANSFORM, Batch, Shaped, Tree

# Columns of batches that were left out because they hold no numbers, with words for their contents.
LEFT_OUT: dict[str, str] = {}
_KINDS = "biufc"
_INSTEAD = "Encode it as numbers, or leave it out of the batch"


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
    """Refuses a number of rows, or of `called`, that does not divide; names the nearest numbers.

    Raises:
      ConfigError: If `rows` is not a positive multiple of `divisor`.
    """
    if rows == 0 or rows % divisor:
        below = rows // divisor * divisor
        above = math.ceil(max(rows, 1) / divisor) * divisor
        sizes = f"{above}" if below == 0 else f"{below} and {above}"
        raise ConfigError(f"{rows} {called} do not divide over {what}. Nearest that do: {sizes}.")


def split_rows(batch: Tree, num: int) -> Tree:
    """Cuts the rows into `num` equal parts, in order: (num, rows of a part, ...)."""
    # The size is given, because JAX cannot find -1 for an array without elements.
    return jax.tree.map(lambda x: x.reshape(num, len(x) // num, *x.shape[1:]), batch)


def transformed(batch: Batch) -> Batch:
    """The rows as a loss reads them: passed through the batch's own function, if it has one."""
    if not (isinstance(batch, Mapping) and callable(batch.get(TRANSFORM))):
        return batch
    return batch[TRANSFORM]({name: x for name, x in batch.items() if name != TRANSFORM})


def as_arrays(batch: Batch) -> Batch:
    """The batch as arrays; a mapping as a dict, without the columns that hold no numbers.

    Args:
      batch: A tree of arrays, tensors, numbers and lists of numbers, or of their shapes.

    Raises:
      DataError: If a leaf that is in no column of a dict holds no numbers, or whole numbers need 64
        bits, and JAX has 32; or if "mask" holds other numbers than 0 and 1.
    """
    if not isinstance(batch, Mapping):
        return jax.tree.map(partial(_array, "the batch"), batch, is_leaf=_is_list_of_values)
    kept = dict[str, Batch]()
    for name, column in batch.items():
        if name == TRANSFORM and callable(column):
            # A `Partial` is a tree without leaves, equal to any other of the same function.
            kept[name] = (
                column
                if isinstance(column, jax.tree_util.Partial)
                else jax.tree_util.Partial(column)
            )
            continue
        try:
            convert = partial(_array, f"batch[{name!r}]")
            kept[name] = jax.tree.map(convert, column, is_leaf=_is_list_of_values)
        except _NoNumbers as error:
            if name not in LEFT_OUT:
                said = "batch[%r] holds %s, and a device holds numbers: it is left out."
                logging.getLogger("jddp").warning(said, name, error.holds)
            LEFT_OUT[name] = error.holds
    if batch and not kept:
        raise DataError(f"no column of the batch holds numbers: {', '.join(map(str, batch))}.")
    _refuse_weights(kept.get("mask"))
    return kept


def _refuse_weights(mask: object) -> None:
    """Refuses a mask on the host that holds anything but 0 and 1."""
    if not isinstance(mask, np.ndarray) or mask.dtype == bool:
        return
    is_mask = (mask == 0) | (mask == 1)
    if not is_mask.all():
        raise DataError(
            f"batch['mask'] holds {mask[~is_mask].flat[0]}: a mask is 1 for an entry that counts "
            "and 0 for any other. Give weights another name, such as batch['weights'], and return "
            "jddp.Mean(losses * weights, weights)."
        )


class _NoNumbers(DataError):
    """A leaf without numbers."""

    def __init__(self, where: str, holds: str) -> None:
        super().__init__(f"{where} holds {holds}, and a device holds numbers. {_INSTEAD}.")
        self.holds = holds


def _is_list_of_values(x: object) -> bool:
    """Whether it is a list of numbers or text: this is an array, and no list of arrays."""
    if not isinstance(x, list) or not x:
        return False
    return all(isinstance(leaf, bool | int | float | complex | str | bytes) for leaf in _leaves(x))


def _leaves(x: object) -> list[object]:
    return [leaf for item in x for leaf in _leaves(item)] if isinstance(x, list) else [x]


def _array(where: str, x: object) -> Shaped:
    """A leaf as an array of numbers.

    Raises:
      _NoNumbers: If it holds no numbers.
      DataError: If a whole number needs 64 bits, or values of a masked array are missing.
    """
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return x
    if np.ma.is_masked(x):
        raise DataError(
            f"{where} is a masked array with missing values. Fill them (x.filled(0)), and give "
            "batch['mask'] to leave their rows out."
        )
    try:
        x = np.asarray(x)
    except (TypeError, ValueError):  # Lists of several lengths, or an object that is no array.
        raise _NoNumbers(where, f"{type(x).__name__} whose rows differ in length") from None
    if x.dtype.kind not in _KINDS and not jnp.issubdtype(x.dtype, np.number):
        words = {"U": "text", "S": "bytes", "O": "objects", "M": "dates", "m": "durations"}
        raise _NoNumbers(where, f"{words.get(x.dtype.kind, 'no numbers')} ({x.dtype})")
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
        _refuse_cut(where, x)
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _refuse_cut(where: str, x: np.ndarray) -> None:
    """Refuses whole numbers of 64 bits that do not fit in 32 bits."""
    limits = np.iinfo(np.int32 if x.dtype.kind == "i" else np.uint32)
    if not x.size or (limits.min <= x.min() and x.max() <= limits.max):
        return
    first = x[(x < limits.min) | (x > limits.max)].flat[0]
    raise DataError(
        f"{where} holds {first}, which needs 64 bits, and JAX would cut it to 32. Give numbers "
        f"below {limits.max + 1:,}, such as indices; leave the column out of the batch; or set "
        "jax_enable_x64."
    )
