"""An end has one code, by one name."""

from jddp.ground import errors
from jddp.ground.errors import ExitCode

ERRORS = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.Error)]


def test_an_error_ends_with_one_of_the_exit_codes_and_each_is_printed_as_its_number():
    assert {kind.exit_code for kind in ERRORS} <= set(ExitCode)
    for code in ExitCode:
        assert f"{code}" == str(code) == str(int(code))  # in words that the launcher reads again
