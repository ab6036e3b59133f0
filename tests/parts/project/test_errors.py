"""An end has one code, by one name, and the page says the same of it as the code."""

import re

from runs import ROOT

from jddp import errors
from jddp.errors import ExitCode
from jddp.launcher.outcome import DETERMINISTIC

PAGE = ROOT / "docs" / "reliability.md"
ROWS = re.findall(r"^\| (\d+) \| `(\w+)` \| .+ \| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE)
ERRORS = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.Error)]


def test_the_page_lists_every_exit_code_and_says_what_is_not_restarted():
    assert [(int(code), name) for code, name, _ in ROWS] == [(x.value, x.name) for x in ExitCode]
    ends = {int(code) for code, _, is_restarted in ROWS if is_restarted == "no"}
    assert ends == {*DETERMINISTIC, ExitCode.PREEMPTED}


def test_an_error_ends_with_one_of_the_exit_codes_and_each_is_printed_as_its_number():
    assert {kind.exit_code for kind in ERRORS} <= set(ExitCode)
    for code in ExitCode:
        assert f"{code}" == str(code) == str(int(code))  # in words that the launcher reads again
