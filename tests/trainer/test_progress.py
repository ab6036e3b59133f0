"""What a run resumes comes back as it was written, wherever the run was interrupted."""

import dataclasses
import functools
import itertools
import json

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import calling, records
from states import equal
from tiny import make_batch, wrapped

import jddp
from jddp.checkpoint.folders import finished
from jddp.data import ArrayExamples, Epochs, Order, TrainBatches
from jddp.data.periods import Reached
from jddp.ground.errors import ConfigError
from jddp.trainer.run import Progress, Skips

NUMBERS = st.integers(0, 2**40)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | FLOATS | st.text()
KEYS = st.text(min_size=1)
RECORDS = st.dictionaries(KEYS, FLOATS | NUMBERS | st.lists(FLOATS) | st.text(), max_size=4)
OBJECTS = st.dictionaries(KEYS, LEAVES | st.lists(LEAVES, max_size=3), max_size=4)
# Also what JSON has no word for.
ANYTHING = st.recursive(
    LEAVES | st.binary(),
    lambda x: st.tuples(x, x) | st.dictionaries(NUMBERS | KEYS, x),
    max_leaves=5,
)
FIELDS = {
    "step": NUMBERS,
    "position": st.dictionaries(KEYS, ANYTHING, max_size=3),
    "before": st.builds(Reached, NUMBERS, NUMBERS, NUMBERS),
    "metrics": RECORDS,
    "evaluations": st.lists(RECORDS, max_size=1),
    "stopped": st.none() | st.text(),
    "skipped": st.builds(Skips, NUMBERS, NUMBERS, st.none() | FLOATS),
    "losses": st.lists(st.tuples(NUMBERS, FLOATS), max_size=4).map(tuple),
    "best": st.lists(NUMBERS, max_size=3),
    "world": OBJECTS,
    "program": st.none() | OBJECTS,
    "config": st.none() | OBJECTS,
    "manifest": OBJECTS,
    "plan": OBJECTS,
}


@given(st.builds(Progress, **FIELDS))
def test_any_progress_that_is_written_is_read_back_equal(progress):
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(Progress)}
    assert Progress.from_json(progress.step, json.loads(json.dumps(progress.to_json()))) == progress


NUM_ROWS, BAD = 576, 60  # a spike needs losses before it
ROWS = {name: np.concatenate([x] * 9) for name, x in make_batch(64).items()}
ROWS["x"] = np.concatenate([ROWS["x"][: 8 * (BAD - 1)], 1e3 * ROWS["x"][:8], ROWS["x"][8 * BAD :]])
ADAPTIVE = functools.cache(lambda: wrapped(optimizer=optax.adam(1e-3)))


def fit(run_dir, *callbacks):
    order = Order(NUM_ROWS, 0, shuffle=False)
    batches = TrainBatches(ArrayExamples(ROWS), global_batch_size=8, order=order)
    stopping = jddp.EarlyStopping(patience=4, min_delta=10.0)  # at the fifth evaluation, step 72
    plan = {"eval_every_steps": Epochs(0.2), "save_every_steps": 7, "log_every_steps": 3}
    plan |= {"callbacks": [stopping, jddp.KeepBest(), *callbacks], "evaluate": [make_batch(16)]}
    plan |= {"checks": jddp.Checks(on_spike="skip"), "run_dir": run_dir}
    return jddp.fit(ADAPTIVE(), batches, num_steps=90, **plan)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return fit(folder), records(folder)


EVENTS = [("on_step", number) for number in (4, BAD, BAD + 1)]
EVENTS += [("on_eval", number) for number in (1, 4, 5)]
EVENTS += [("on_save", 1), ("on_save", 3), ("on_epoch", 1)]


@pytest.mark.parametrize("event, number", EVENTS)
def test_a_run_that_is_interrupted_after_any_event_resumes_to_the_same_records(
    whole, tmp_path, event, number
):
    run, want = whole
    assert run.stopped is not None
    assert any("spike" in record for record in want)
    calls = itertools.count(1)

    def interrupt(*_):
        if next(calls) == number:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path, calling(**{event: interrupt}))
    again = fit(tmp_path)
    assert records(tmp_path) == want
    assert (again.stopped, again.evaluations) == (run.stopped, run.evaluations)
    equal(again.state.params, run.state.params)


NUM_EXAMPLES = 20
ENDS = {3: 1.2, 5: 2.0, 8: 3.2}  # of three epochs, with eight examples a step: 24, 40 and 64
EACH = {"eval_every_steps": Epochs(1), "log_every_steps": Epochs(1), "save_every_steps": Epochs(1)}


def fit_by_epoch(plain, run_dir=None, num_steps=9, size=8, **options):
    batches = TrainBatches(make_batch(NUM_EXAMPLES), global_batch_size=size, seed=0)
    options = {"evaluate": [make_batch(6, seed=9)], "keep": 9, **EACH, **options}
    return jddp.fit(plain, batches, num_steps=num_steps, run_dir=run_dir, **options)


def epochs_of(run, split):
    return {x["step"]: x["epoch"] for x in run.history if x["split"] == split}


def test_all_is_due_after_the_first_step_that_completes_an_epoch(plain, tmp_path):
    run = fit_by_epoch(plain, tmp_path)
    assert epochs_of(run, "eval") == epochs_of(run, "train") == {**ENDS, 9: 3.6}
    assert finished(tmp_path / "checkpoints") == [*ENDS, 9]
    assert records(tmp_path)[0]["epoch"] == 1.2


def test_periods_in_steps_and_in_parts_of_an_epoch_stand_side_by_side(plain):
    run = fit_by_epoch(plain, eval_every_steps=Epochs(1.5), log_every_steps=4)
    assert epochs_of(run, "eval") == {4: 1.6, 8: 3.2, 9: 3.6}
    assert epochs_of(run, "train") == {4: 1.6, 8: 3.2, 9: 3.6}
    halves = epochs_of(fit_by_epoch(plain, eval_every_steps=Epochs(0.5)), "eval")
    assert [*halves] == [2, 3, 4, 5, 7, 8, 9]


def test_the_padding_of_a_last_batch_is_no_part_of_an_epoch(plain):
    given = {"global_batch_size": 12, "num_epochs": 2, "evaluate": make_batch(6), **EACH}
    assert epochs_of(jddp.fit(plain, make_batch(NUM_EXAMPLES), **given), "eval") == {2: 1.2, 4: 2.0}


@pytest.mark.parametrize("size", [2, 8, 16])
def test_an_evaluation_that_was_interrupted_is_repeated_at_any_batch_size(plain, tmp_path, size):
    def break_off(run):  # before the evaluation of the same step
        if run.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_by_epoch(plain, tmp_path, callbacks=[calling(on_save=break_off)])
    run = fit_by_epoch(plain, tmp_path, size=size, num_steps=4)
    assert epochs_of(run, "eval") == {3: 1.2, 4: 1.2 + size / NUM_EXAMPLES}


@pytest.mark.parametrize("size, ends", [(4, {6: 2.0, 11: 3.0}), (12, {5: 2.2, 6: 2.8})])
def test_a_run_that_resumes_with_another_batch_size_keeps_the_schedule(plain, tmp_path, size, ends):
    fit_by_epoch(plain, tmp_path, num_steps=4)
    run = fit_by_epoch(plain, tmp_path, num_steps=max(ends), size=size)
    assert epochs_of(run, "eval") == {3: 1.2, 4: 1.6, **ends}


def test_batches_that_know_no_epochs_are_refused_with_the_way_out(plain):
    message = r"eval_every_steps=Epochs\(.*0.5\): these batches know no epochs"
    with pytest.raises(ConfigError, match=message):
        jddp.fit(plain, [make_batch(8)] * 2, num_steps=2, eval_every_steps=Epochs(0.5))
