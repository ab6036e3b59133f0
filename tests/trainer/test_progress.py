"""What a run resumes comes back as it was written, wherever the run was interrupted."""

import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import records
from tiny import make_batch, wrapped

import jddp
from jddp.data import ArrayExamples, Epochs, Order, TrainBatches
from jddp.data.periods import Reached
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
    text = json.dumps(progress.to_json())
    assert Progress.from_json(progress.step, json.loads(text)) == progress


class Interrupting(jddp.Callback):
    """Raises at the nth call of one method, as a callback with a mistake does."""

    def __init__(self, event, number):
        self.left = number
        setattr(self, event, self.raise_at)

    def raise_at(self, *_):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("interrupted")


NUM_ROWS, BAD = 576, 60  # a spike needs losses before it
ROWS = {name: np.concatenate([x] * 9) for name, x in make_batch(64).items()}
ROWS["x"] = np.concatenate([ROWS["x"][: 8 * (BAD - 1)], 1e3 * ROWS["x"][:8], ROWS["x"][8 * BAD :]])


@functools.cache
def adaptive():
    return wrapped(optimizer=optax.adam(1e-3))


def fit(run_dir, *callbacks):
    order = Order(NUM_ROWS, 0, shuffle=False)
    batches = TrainBatches(ArrayExamples(ROWS), global_batch_size=8, order=order)
    stopping = jddp.EarlyStopping(patience=4, min_delta=10.0)  # at the fifth evaluation, step 72
    return jddp.fit(
        adaptive(),
        batches,
        num_steps=90,
        evaluate=[make_batch(16)],
        eval_every_steps=Epochs(0.2),
        save_every_steps=7,
        log_every_steps=3,
        run_dir=run_dir,
        callbacks=[stopping, jddp.KeepBest(), *callbacks],
        checks=jddp.Checks(on_spike="skip"),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return fit(folder), records(folder)


EVENTS = [
    ("on_step", 4),
    ("on_step", BAD),
    ("on_step", BAD + 1),
    ("on_eval", 1),
    ("on_eval", 4),
    ("on_eval", 5),
    ("on_save", 1),
    ("on_save", 3),
    ("on_epoch", 1),
]


@pytest.mark.parametrize("event, number", EVENTS)
def test_a_run_that_is_interrupted_after_any_event_resumes_to_the_same_records(
    whole, tmp_path, event, number
):
    run, want = whole
    assert run.stopped is not None
    assert any("spike" in record for record in want)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path, Interrupting(event, number))
    again = fit(tmp_path)
    assert records(tmp_path) == want
    assert (again.stopped, again.evaluations) == (run.stopped, run.evaluations)
    for x, y in zip(*map(jax.tree.leaves, (again.state.params, run.state.params)), strict=True):
        np.testing.assert_array_equal(x, y)
