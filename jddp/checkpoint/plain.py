"""Values of Python that pass through JSON: they come back equal, or are refused.

    text = json.dumps(to_plain({0: (1, b"2")}, "extra="))
    from_plain(json.loads(text))  # {0: (1, b"2")}

JSON turns keys into text and tuples into lists, and knows no bytes. Values that it would change are
written as the text of a literal, which is read back without running code.
"""

import ast
import contextlib
import json
from typing import Any

import numpy as np

from jddp.ground.errors import ConfigError

LITERAL = "@python"  # the only key of an object that holds a literal


def to_plain(value: object, called: str) -> Any:
    """Returns values of JSON for a value: itself, or the text of a literal.

    Args:
      value: Numbers, text, bytes, None, and lists, tuples and dicts of them. NumPy's numbers come
        back as Python's numbers.
      called: Name of the value, for an error.

    Raises:
      ConfigError: If it holds anything else.
    """
    for given in (value, {LITERAL: repr(value)}):
        with contextlib.suppress(TypeError, ValueError, SyntaxError, RecursionError):
            plain = json.loads(json.dumps(given, default=np.generic.item))
            back = from_plain(plain)
            if back == value or repr(back) == repr(value):  # NaN is not equal to itself.
                return plain
    raise ConfigError(
        f"{called} cannot be saved: {str(value)[:80]!r}. Give numbers, text, lists, tuples, dicts."
    )


def from_plain(plain: Any) -> Any:
    """Returns the value that `to_plain` has converted to this one."""
    is_literal = isinstance(plain, dict) and plain.keys() == {LITERAL}
    return ast.literal_eval(plain[LITERAL]) if is_literal else plain
