"""Periods in steps and in epochs: the steps with which they end."""

import pytest

from jddp.data.periods import Epochs, OptimizerSteps, Reached
from jddp.ground.errors import ConfigError


def steps_at_ends(period, num_examples, batch_sizes):
    """The steps with which periods end, with the numbers of these periods."""
    found, now = {}, Reached(0, 0, num_examples)
    for size in batch_sizes:
        before, now = now, Reached(now.step + 1, now.examples + size, num_examples)
        if ended := period.ended(before, now):
            found[now.step] = [*ended]
    return found


@pytest.mark.parametrize(
    ("period", "num_examples", "batch_sizes", "ends"),
    [
        (OptimizerSteps(3), 0, [8] * 7, {3: [1], 6: [2]}),
        (OptimizerSteps(3), 20, [8] * 7, {3: [1], 6: [2]}),
        (Epochs(1), 20, [8] * 8, {3: [1], 5: [2], 8: [3]}),  # the step that takes its last example
        (Epochs(2), 20, [8] * 10, {5: [1], 10: [2]}),
        (Epochs(1), 20, [20] * 2, {1: [1], 2: [2]}),
        (Epochs(0.5), 20, [8] * 5, {2: [1], 3: [2], 4: [3], 5: [4]}),
        (Epochs(0.1), 20, [8] * 2, {1: [1, 2, 3, 4], 2: [5, 6, 7, 8]}),
        (Epochs(1), 20, [8, 8, 8, 4, 4, 4, 4], {3: [1], 7: [2]}),  # whatever the batch size
        (Epochs(1), 0, [8] * 8, {}),  # Batches that know no epochs end none.
    ],
)
def test_a_period_ends_with_the_step_that_completes_it(period, num_examples, batch_sizes, ends):
    assert steps_at_ends(period, num_examples, batch_sizes) == ends


@pytest.mark.parametrize("parts", [3, 6, 7, 10, 11, 49])
def test_as_many_parts_end_in_many_epochs_as_in_exact_arithmetic(parts):
    ends = steps_at_ends(Epochs(1 / parts), 3 * 1000 * parts, [1000] * 3 * parts * 4)
    assert ends == {3 * number: [number] for number in range(1, 4 * parts + 1)}


@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf")])
def test_what_is_no_number_of_epochs_is_refused(number):
    with pytest.raises(ConfigError, match="positive"):
        Epochs(number)
