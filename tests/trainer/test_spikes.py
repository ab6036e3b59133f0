"""A loss far above those before it is a spike; noise, a drift and the first losses are none."""

import functools
import json
import math

import numpy as np
import optax
import pytest
import tiny
from runs import records
from states import assert_same, copied
from sweeps import swept
from tiny import MLP, make_batch, take_steps

import jddp
from jddp.ground.errors import NumericsError
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
    (note,) = notes
    assert note.startswith("step 53: the loss jumps to 52, 50 MADs above")
    assert json.loads(json.dumps(progress.losses))[-1] == [54, 52.0]
    assert look(losses, looking(None))[2].losses == ()  # looks for none


def test_a_limit_is_known_before_the_loss_of_the_step_before_it_is_and_does_not_depend_on_it():
    losses, skip = noisy(2, 130), looking("skip")
    early, late = (look(x)[2] for x in (losses[:-1], losses))
    assert skip.options(early) == skip.options(late)
    assert skip.options(Progress()) == {"loss_limit": math.inf}
    assert looking().options(late) == looking(None).options(late) == {}


def test_a_loss_at_the_limit_is_none_and_the_next_number_of_float32_is_one():
    limit = limit_after(noisy(2, 100))
    losses = np.float32([limit, np.nextafter(np.float32(limit), np.float32(9))])
    assert [float(loss) > limit for loss in losses] == [False, True]


NOISES = {  # and false alarms in a million steps
    "normal": (lambda rng, n: rng.standard_normal(n), 0),
    "laplace": (lambda rng, n: rng.laplace(size=n), 10),
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


BAD = 60  # the step of the poisoned batch


def poisoned(bad=(BAD,), num=70):
    """Batches of eight rows, of which those of these numbers have wrong labels and large inputs."""
    for step in range(1, num + 1):
        batch = make_batch(8, seed=step % 5)
        yield {"x": 100 * batch["x"], "y": (batch["y"] + 1) % 4} if step in bad else batch


wrapped = functools.partial(tiny.wrapped, optimizer=optax.adam(1e-3))


def fit(ddp, action, given=None, num_steps=70, **options):
    checks = jddp.Checks(on_spike=action, **options.pop("checks", {}))
    return jddp.fit(ddp, given or poisoned(), num_steps=num_steps, checks=checks, **options)


def spiking(history):
    return [record["step"] for record in history if "spike" in record]


def test_a_spike_is_reported_in_a_line_and_a_record_and_changes_nothing(tmp_path, capsys):
    run = fit(wrapped(), "warn", run_dir=tmp_path)
    said = capsys.readouterr().out
    assert said.count("the loss jumps to") == 1
    assert f"step {BAD}: the loss jumps to" in said
    assert spiking(records(tmp_path)) == [BAD]
    assert records(tmp_path)[1]["spike"] > 20
    assert_same(run.state, fit(wrapped(), None).state)
    assert "the loss jumps" not in capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_left_to_the_other_guard():
    batch = make_batch(8)
    for skips in (False, True):
        ddp = wrapped(skip_nonfinite=skips)
        state, _ = take_steps(ddp, [batch])
        state, _ = ddp.step(state, {**batch, "x": batch["x"] * np.nan}, loss_limit=0.1)
        assert int(state.skipped) == skips


@pytest.mark.parametrize("mesh", swept([8, 1], every=2))
def test_a_run_that_skips_a_spike_ends_as_one_whose_poisoned_step_is_undone_by_hand(
    tmp_path, capsys, mesh
):
    ddp = wrapped(MLP(dropout_rate=0.1), mesh=mesh)
    run = fit(ddp, "skip", run_dir=tmp_path)
    assert "its update is left out" in capsys.readouterr().out
    assert int(run.state.skipped) == 1
    assert spiking(records(tmp_path)) == [BAD]
    state = None
    for step, batch in enumerate(poisoned(), 1):
        kept = state and copied(state)
        state, _ = take_steps(ddp, [batch], state)
        if step == BAD:
            state = kept.replace(step=state.step, skipped=state.skipped + 1)
    assert_same(run.state, state)


def test_too_many_spikes_in_a_row_end_the_run_with_the_evidence(tmp_path):
    bad = range(BAD, 71)
    checks = {"checks": {"max_consecutive_skips": 3}}
    message = f"at step {BAD + 2}, the last of 3 in a row .*: the loss is far above .* before, 1"
    with pytest.raises(NumericsError, match=message):
        fit(wrapped(), "skip", poisoned(bad), run_dir=tmp_path, **checks)
    assert (tmp_path / "nonfinite" / f"step_{BAD + 2}" / "report.json").exists()
