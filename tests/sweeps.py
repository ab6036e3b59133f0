"""Sweeps: tests of many cases, of which a few run each time and all in a long run."""

import pytest


def swept(cases, every):
    """Cases by name or in a row, of which all but every so many are long tests."""
    named = cases.items() if isinstance(cases, dict) else ((None, case) for case in cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=[pytest.mark.long] if number % every else [],
        )
        for number, (name, case) in enumerate(named)
    ]
