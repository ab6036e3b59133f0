"""A loss far above those before it is a spike; noise, a drift and the first losses are none."""

import math

import numpy as np
import pytest

from jddp.trainer.numerics import LAG, RULE, SpikeRule, Spikes

WARN = Spikes("warn")


def look(losses, spikes=WARN, kept=(), begin=1):
    """The spikes in a series, whose first loss is that of step `begin`; and the losses kept."""
    found = []
    for step, loss in enumerate(losses, begin):
        kept, spike = spikes.look(kept, step, float(loss))
        found += [spike] if spike else []
    return found, kept


def spikes_in(losses, *args):
    return [spike.step for spike in look(losses, *args)[0]]


def noisy(level, size=300):
    return level + 0.05 * np.random.default_rng(0).standard_normal(size)


FALLING = 2 * np.exp(-np.arange(300) / 80)
QUIET = {
    "constant": np.full(300, 0.7),
    "all zero, then not": [0.0] * 150 + [0.1] * 150,
    "noise": noisy(2),
    "falling": noisy(FALLING),
    "falling in steps": np.repeat([4.0, 2.0, 1.0], 100),
    "rising slowly": noisy(1 + np.arange(300) / 300),
    "negative": noisy(-3),
    "a spike downwards": [*noisy(2, 200), 0.1, *noisy(2, 99)],
    "a spike among the first": [*noisy(2, RULE.least), 90.0],
    "not finite": [*noisy(2, 200), math.nan, math.inf, -math.inf, *noisy(2, 97)],
}


@pytest.mark.parametrize("losses", QUIET.values(), ids=QUIET)
def test_no_spike_is_found(losses):
    assert spikes_in(losses) == []


def test_a_jump_is_a_spike_and_those_after_it_are_judged_as_if_it_had_not_been():
    assert spikes_in([*noisy(2, 200), 4.0, *noisy(2, 50), 4.0, *noisy(2, 50)]) == [201, 252]
    assert spikes_in([*np.full(200, 0.7), 0.8, 0.7]) == [201]
    assert spikes_in([*noisy(-3, 200), 1.0]) == [201]
    assert spikes_in([*noisy(2, RULE.least + LAG - 1), 4.0]) == [RULE.least + LAG]


def test_a_loss_that_rises_for_good_is_a_spike_until_it_is_nearly_half_of_the_window():
    found = spikes_in([*noisy(2, 200), *noisy(4, 200)])
    assert found == list(range(201, 201 + len(found)))
    assert RULE.window // 3 < len(found) <= RULE.window // 2 + LAG


def test_a_spike_has_its_numbers_and_one_line_for_a_row_of_them():
    spikes = Spikes("warn", SpikeRule(least=3), rows="jddp data rows runs/a --step")
    (first, second), _ = look([1.0, 2.0, 3.0, 2.0, 52.0, 52.0], spikes)
    assert (first.median, first.num_mads, first.is_first, second.is_first) == (2, 50, True, False)
    assert spikes.note(first) == (
        "step 5: the loss jumps to 52, 50 MADs above the median of the losses before, 2; its "
        "examples: jddp data rows runs/a --step 5"
    )
    assert spikes.note(second) == ""


def test_no_more_losses_are_kept_than_the_next_ones_are_compared_with():
    assert len(look(noisy(2, 500))[1]) == RULE.window + LAG


def test_a_limit_is_known_before_the_loss_of_the_step_before_it_is_and_does_not_depend_on_it():
    losses, skip = noisy(2, 130), Spikes("skip")
    (_, early), (_, late) = look(losses[:-1]), look(losses)
    assert skip.limits(early, 131) == skip.limits(late, 131)
    assert skip.limits((), 1) == {"loss_limit": math.inf}
    assert Spikes("warn").limits((), 1) == Spikes(None).limits((), 1) == {}


def test_a_loss_at_the_limit_is_none_and_the_next_number_of_float32_is_one():
    limit = RULE.limit(noisy(2, 100))
    losses = np.float32([limit, np.nextafter(np.float32(limit), np.float32(9))])
    assert [float(loss) > limit for loss in losses] == [False, True]


def test_without_an_action_nothing_is_looked_for():
    assert look([*noisy(2, 200), 90.0], Spikes(None)) == ([], ())


NOISES = {  # and false alarms in a million steps
    "normal": (lambda rng, n: rng.standard_normal(n), 0),
    "laplace": (lambda rng, n: rng.laplace(size=n), 10),
    "t with 5 degrees": (lambda rng, n: rng.standard_t(5, n), 40),
    "t with 3 degrees": (lambda rng, n: rng.standard_t(3, n), 800),
}


@pytest.mark.parametrize("draw, most", NOISES.values(), ids=NOISES)
def test_false_alarms_are_as_rare_as_the_module_says(draw, most):
    """The rule over windows at once; in a test of its own it is equal to the one for a window."""
    noise = draw(np.random.default_rng(1), 40_000)
    windows = np.lib.stride_tricks.sliding_window_view(noise, RULE.window)[:-LAG]
    median = np.median(windows, axis=1)
    mad = np.median(np.abs(windows - median[:, None]), axis=1)
    limits = median + RULE.num_mads * np.maximum(mad, RULE.floor * np.abs(median))
    assert limits[7] == pytest.approx(RULE.limit(noise[7 : 7 + RULE.window].tolist()))
    alarms = np.sum(noise[RULE.window + LAG - 1 :] > limits[: len(noise) - RULE.window - LAG + 1])
    assert alarms <= most * len(noise) / 1e6 + (most > 0)
