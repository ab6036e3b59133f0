"""Numbers: sums in one order, the two dtypes of half precision, and bytes in words."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jddp.ground.errors import check_choice

MEBIBYTE = 2**20


def in_mebibytes(num_bytes: float) -> str:
    """A number of bytes in MiB, with three significant digits."""
    mebibytes = num_bytes / MEBIBYTE
    return f"{mebibytes:,.3f}" if mebibytes >= 1 else f"{mebibytes:.3g}"


def half_precision(option: str, dtype: DTypeLike | None) -> np.dtype | None:
    """Returns the dtype that is given for an option.

    Raises:
      ConfigError: If it is not bfloat16, float16 or None.
    """
    name = dtype if isinstance(dtype, str | None) else jnp.dtype(dtype).name
    check_choice(option, name, ("bfloat16", "float16", None))
    return None if name is None else jnp.dtype(name)


def add_in_pairs(rows: jax.Array) -> jax.Array:
    """Adds up the rows of an array."""
    while len(rows) > 1:
        paired = len(rows) // 2 * 2
        # A last row without a neighbour is added one level higher: padding with zeros would turn -0
        # into 0.
        rows = jnp.concatenate([rows[:paired:2] + rows[1:paired:2], rows[paired:]])
    return rows[0]
