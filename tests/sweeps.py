"""Sweeps: tests of many cases, of which a few run each time and all in a long run."""

import pytest


def swept(cases, every):
    """Cases for `pytest.mark.parametrize`, of which only every so many are no long tests.

    Args:
      cases: Cases by name, or in a row. A tuple has a value for each argument of the test.
      every: 1 for all cases, 2 for each second one, the first included.
    """
    named = cases.items() if isinstance(cases, dict) else ((None, case) for case in cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=[pytest.mark.long] if number % every else [],
        )
        for number, (name, case) in enumerate(named)
    ]
