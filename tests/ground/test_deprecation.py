"""A name that goes warns where it is used, with the name in its place."""

import pytest

from jddp.ground.errors import warn_deprecated


def test_a_deprecated_name_warns_at_its_callers_line():
    old_name = lambda: warn_deprecated("old_name", since="0.2", instead="new_name")  # noqa: E731
    with pytest.warns(FutureWarning, match=r"old_name .* since jddp 0\.2 .* new_name") as caught:
        old_name()
    assert [warning.filename for warning in caught] == [__file__]
