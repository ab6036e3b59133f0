"""Splits examples into those for training and those for testing, where the data has one part.

    is_test = rows_for_testing(len(rows), 0.2)

The number of a row decides, and no seed: a row stays on its side when others are added after it.
"""

import numpy as np

from jddp.errors import ConfigError


def check_share(test_share: float) -> None:
    """Refuses a share of examples for testing that leaves none on one side.

    Raises:
      ConfigError: If it is not between 0 and 1.
    """
    if not 0 < test_share < 1:
        raise ConfigError(f"data.kwargs.test_share: {test_share!r} is not between 0 and 1.")


def rows_for_testing(num_rows: int, test_share: float) -> np.ndarray:
    """Which of the rows are for testing, `(num_rows,)`: about this share of them.

    Raises:
      ConfigError: If the share is not between 0 and 1.
    """
    check_share(test_share)
    # numpy promises Philox's raw bits, not what `Generator` makes of them (NEP 19).
    return np.random.Philox(key=0).random_raw(num_rows) * 2.0**-64 < test_share
