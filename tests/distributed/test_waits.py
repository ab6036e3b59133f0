"""A wait for other processes is seen while it lasts, and its time is that of one wait alone."""

import jax.numpy as jnp

from jddp.distributed import coordination
from jddp.distributed.coordination import LongestWait, awaiting, computing, is_waiting_for


def test_a_wait_is_seen_while_it_lasts_by_the_processes_that_it_is_for():
    assert not is_waiting_for({0, 1})
    with awaiting({1, 2}):
        assert is_waiting_for({0, 1})
        assert not is_waiting_for({0, 3})
    with computing({"x": jnp.ones(3), "name": 1}):  # whose devices are all of this process
        assert not is_waiting_for({0, 1})
    assert not is_waiting_for({1})


def test_the_longest_wait_is_that_for_one_thing_and_not_for_many_in_a_row(monkeypatch):
    now, longest = [0.0], LongestWait()
    monkeypatch.setattr(coordination.time, "monotonic", lambda: now[0])
    for _ in range(3):
        with awaiting({1}):
            assert longest.seconds({1}) == 0.0
            now[0] += 5
            with awaiting({1}):
                assert longest.seconds({1}) == 5.0
    assert longest.seconds({1}) == 0.0
