"""A loss far above those before it is a spike; noise, a drift and the first losses are none."""

import json
import math

import numpy as np
import pytest

import jddp
from jddp.trainer.numerics import (
    LAG,
    LEAST_LOSSES,
    LEAST_MAD,
    NUM_MADS,
    WINDOW,
    Numerics,
    Sent,
    limit_after,
)
from jddp.trainer.run import Progress


def looking(action="warn"):
    return Numerics(None, None, None, jddp.Checks(on_spike=action))


def look(losses, numerics=None):
    """The steps of the spikes in a series, the notes on them, and the progress."""
    found, notes, progress = [], [], Progress()
    for step, loss in enumerate(map(float, losses), 1):
        # What is not finite is skipped.
        skipped = progress.skipped.total + (not math.isfinite(loss))
        sent = Sent(step, {"loss": loss, "skipped": skipped}, {}, {})
        progress, note, fields = (numerics or looking()).look(progress, sent, None)
        found += [step] if fields else []
        notes += [note] if fields and note else []
    return found, notes, progress


def noisy(level, size=300):
    return level + 0.05 * np.random.default_rng(0).standard_normal(size)


QUIET = {
    "constant": np.full(300, 0.7),
    "all zero, then not": [0.0] * 150 + [0.1] * 150,
    "falling": noisy(2 * np.exp(-np.arange(300) / 80)),
    "falling in steps": np.repeat([4.0, 2.0, 1.0], 100),
    "rising slowly": noisy(1 + np.arange(300) / 300),
    "negative": noisy(-3),
    "a spike downwards": [*noisy(2, 200), 0.1, *noisy(2, 99)],
    "a spike among the first": [*noisy(2, LEAST_LOSSES), 90.0],
    "not finite": [*noisy(2, 200), math.nan, math.inf, -math.inf, *noisy(2, 97)],
}


@pytest.mark.parametrize("losses", QUIET.values(), ids=QUIET)
def test_no_spike_is_found(losses):
    assert look(losses)[0] == []


RISEN = [*noisy(2, 200), *noisy(4, 200)]  # for good: until it is nearly half of the window
JUMPS = [
    ([*noisy(2, 200), 4.0, *noisy(2, 50), 4.0, *noisy(2, 50)], [201, 252]),
    ([*np.full(200, 0.7), 0.8, 0.7], [201]),
    ([*noisy(-3, 200), 1.0], [201]),
    ([*noisy(2, LEAST_LOSSES + LAG - 1), 4.0], [LEAST_LOSSES + LAG]),
    (RISEN, list(range(201, 243))),
]


@pytest.mark.parametrize("losses, steps", JUMPS)
def test_a_jump_is_a_spike_and_those_after_it_are_judged_as_if_it_had_not_been(losses, steps):
    found, _, progress = look(losses)
    assert found == steps
    assert len(progress.losses) == min(WINDOW + LAG, len(losses))  # no more than are compared


def test_a_spike_has_its_numbers_and_one_line_for_a_row_of_them():
    losses = [1.0, 2.0, 3.0, 2.0] * 13 + [52.0, 52.0]
    found, notes, progress = look(losses)
    assert found == [53, 54]
    assert notes == [
        "step 53: the loss jumps to 52, 50 MADs above the median of the losses before, 2"
    ]
    assert json.loads(json.dumps(progress.losses))[-1] == [54, 52.0]
    assert look(losses, looking(None))[2].losses == ()  # looks for none


def test_a_limit_is_known_before_the_loss_of_the_step_before_it_is_and_does_not_depend_on_it():
    losses, skip = noisy(2, 130), looking("skip")
    early, late = (look(x)[2] for x in (losses[:-1], losses))
    assert skip.limits(early) == skip.limits(late)
    assert skip.limits(Progress()) == {"loss_limit": math.inf}
    assert looking().limits(late) == looking(None).limits(late) == {}


def test_a_loss_at_the_limit_is_none_and_the_next_number_of_float32_is_one():
    limit = limit_after(noisy(2, 100))
    losses = np.float32([limit, np.nextafter(np.float32(limit), np.float32(9))])
    assert [float(loss) > limit for loss in losses] == [False, True]


NOISES = {  # and false alarms in a million steps
    "normal": (lambda rng, n: rng.standard_normal(n), 0),
    "laplace": (lambda rng, n: rng.laplace(size=n), 10),
    "t with 5 degrees": (lambda rng, n: rng.standard_t(5, n), 40),
    "t with 3 degrees": (lambda rng, n: rng.standard_t(3, n), 800),
}


@pytest.mark.parametrize("draw, most", NOISES.values(), ids=NOISES)
def test_false_alarms_are_as_rare_as_the_module_says(draw, most):
    """The rule over windows at once, which is equal to the one for a window."""
    noise = draw(np.random.default_rng(1), 40_000)
    windows = np.lib.stride_tricks.sliding_window_view(noise, WINDOW)[:-LAG]
    median = np.median(windows, axis=1)
    mad = np.median(np.abs(windows - median[:, None]), axis=1)
    limits = median + NUM_MADS * np.maximum(mad, LEAST_MAD * np.abs(median))
    assert limits[7] == pytest.approx(limit_after(noise[7 : 7 + WINDOW].tolist()))
    alarms = np.sum(noise[WINDOW + LAG - 1 :] > limits[: len(noise) - WINDOW - LAG + 1])
    assert alarms <= most * len(noise) / 1e6 + (most > 0)
