"""A process ends when another one of its job has failed first."""

import pytest

from jddp.distributed import coordination, failure
from jddp.distributed.failure_file import describe_failure


class Followed(Exception):
    """The process would end here."""


@pytest.mark.parametrize(("code", "error", "pauses"), [(-9, None, []), (1, ValueError(), [1.0])])
def test_a_process_waits_for_its_own_error_unless_one_was_killed(monkeypatch, code, error, pauses):
    def follow(first):
        raise Followed

    first = describe_failure(1, code, error)
    monkeypatch.setattr(coordination, "is_connected", lambda: True)
    monkeypatch.setattr(failure, "_first_failure", lambda seconds: first)
    monkeypatch.setattr(failure, "_follow", follow)
    paused = []
    monkeypatch.setattr(failure.time, "sleep", paused.append)
    with pytest.raises(Followed):
        failure.Listener().listen()
    assert paused == pauses
