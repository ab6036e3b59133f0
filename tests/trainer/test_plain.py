"""Values that pass through JSON come back equal, or are refused."""

import json
import random
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import pytest

from jddp.ground.errors import ConfigError
from jddp.trainer.reports.files import from_plain, to_plain

VALUES = [
    {0: 3, 1: {"next": None}},
    {"0": 1, 0: 2, (1, "a"): 3, None: 4, True: 5.5},
    ("a", [("b",), ()], [1.5, -0.0, 10**30], {1, 2}),
    {"state": b"\x00\xff"},
    {"@python": "[1]"},
    random.Random(3).getstate(),
    np.random.PCG64(3).state,
    [float("inf"), float("nan"), True, None, "\ud800 é"],
    OrderedDict(b=1, a=2),
    {"x": np.int64(3), "y": np.float32(0.1), "flag": np.bool_(True)},
]


def through_json(value):
    return from_plain(json.loads(json.dumps(to_plain(value, "state"))))


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_equal(value):
    found = through_json(value)
    assert found == value or repr(found) == repr(value)  # NaN
    assert type(found) is type(value) or isinstance(value, dict)


HOLDS_ITSELF = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
OTHERS = [{1, object()}, {"x": [jnp.ones(2)]}, object(), {"x": np.ones(2)}, {0: np.ones(())}]


@pytest.mark.parametrize("value", [*OTHERS, HOLDS_ITSELF], ids=range(6))
def test_other_values_are_refused_in_one_line(value):
    with pytest.raises(ConfigError, match="^extra= ") as caught:
        to_plain(value, "extra=")
    assert "\n" not in str(caught.value)
