"""An end has one code, by one name, and the page says the same of it as the code."""

import re
from pathlib import Path

import pytest

from jddp import errors
from jddp.errors import ExitCode
from jddp.launcher.outcome import DETERMINISTIC

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
ROWS = re.findall(r"^\| (\d+) \| `(\w+)` \| .+ \| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE)
ERRORS = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.Error)]


def test_the_page_lists_every_exit_code():
    assert [(int(code), name) for code, name, _ in ROWS] == [(x.value, x.name) for x in ExitCode]


def test_the_page_says_what_is_not_restarted():
    assert {int(code) for code, _, is_restarted in ROWS if is_restarted == "no"} == {
        *DETERMINISTIC,
        ExitCode.PREEMPTED,
    }


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_ends_with_one_of_the_exit_codes(kind):
    assert kind.exit_code in ExitCode


@pytest.mark.parametrize("code", ExitCode)
def test_an_exit_code_is_printed_as_its_number(code):
    assert f"{code}" == str(code) == str(int(code))  # in words that the launcher reads again
