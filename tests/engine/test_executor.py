"""Steps are sent ahead of the devices, and on CPUs not far."""

import pytest

from jddp.engine.compiled import Call
from jddp.engine.data_parallel import Executor


class Computed:
    """A value on devices, which notes that it was waited for."""

    def __init__(self, number, waited):
        self.number, self.waited = number, waited

    def block_until_ready(self):
        self.waited.append(self.number)


@pytest.mark.parametrize("platform, waited_for", [("cpu", [0, 1, 2]), ("gpu", [])])
def test_at_most_four_steps_are_in_flight_on_cpus(platform, waited_for):
    executor, waited = Executor(donate=False, platform=platform), []
    for i in range(7):

        def run(state, inputs, i=i):
            return state, Computed(i, waited)

        executor.send(Call(None, run, f"state {i}", None))
    assert waited == waited_for
    assert executor.latest == "state 6"
