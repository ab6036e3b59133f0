"""Objects that a user changes after having given them change nothing that was taken from them."""

import jax
import numpy as np
import optax
import pytest
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.trainer.run import Callback


def wrapped(**options):
    return jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2, **options)


def aligned(array):
    """A copy that begins at a multiple of 64 bytes, where JAX takes memory as it is on a CPU."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    found = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[:] = array
    return found


class Reused:
    """Batches in one buffer, which the next batch overwrites, and whose state is one dict."""

    def __init__(self, num=8):
        self._batches = [make_batch(seed=seed) for seed in range(num)]
        self._buffer = {name: aligned(x) for name, x in self._batches[0].items()}
        self._state = {"position": {"next": 0}}

    def __iter__(self):
        return self

    def __next__(self):
        number = self._state["position"]["next"]
        if number == len(self._batches):
            raise StopIteration
        for name, x in self._batches[number].items():
            self._buffer[name][:] = x
        self._state["position"]["next"] = number + 1
        return self._buffer

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._state = state


def fresh(num=8):
    return [make_batch(seed=seed) for seed in range(num)]


def assert_same(found, want):
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_a_batch_may_be_overwritten_by_the_next_in_fit_a_step_and_an_evaluation():
    ddp = wrapped()
    want = jddp.fit(ddp, fresh(), num_steps=8, evaluate=fresh())
    run = jddp.fit(ddp, Reused(), num_steps=8, evaluate=fresh())
    assert_same(run.state.params, want.state.params)
    assert ddp.evaluate(run.state, Reused()) == want.evaluate()
    state = ddp.init(0, make_batch())
    for batch in Reused():
        state, _ = ddp.step(state, batch)
        batch["x"][:] = np.nan
    assert_same(state.params, want.state.params)


class Fails(Callback):
    def on_step(self, run, metrics):
        if metrics["step"] == 4:
            raise ValueError("mine")


class Scribbles(Callback):
    """Changes all that it is given."""

    def on_step(self, run, metrics):
        metrics.clear()

    def on_eval(self, run, metrics):
        metrics["loss"] = -1.0
        metrics.setdefault("table", []).append(1)


def test_a_saved_position_stays_where_it_was_though_the_iterator_moves_its_own(tmp_path):
    with pytest.raises(ValueError, match="mine"):
        jddp.fit(wrapped(), Reused(), num_steps=8, run_dir=tmp_path, callbacks=[Fails()])
    batches = Reused()
    run = jddp.fit(wrapped(), batches, num_steps=8, run_dir=tmp_path)
    assert_same(run.state.params, jddp.fit(wrapped(), fresh(), num_steps=8).state.params)


def test_what_a_callback_changes_is_its_own(tmp_path):
    seen = []

    class Sees(Callback):
        def on_eval(self, run, metrics):
            seen.append(dict(metrics))

    plan = {"num_steps": 4, "evaluate": fresh(2), "eval_every_steps": 2, "log_every_steps": 1}
    callbacks = [Scribbles(), Sees()]
    run = jddp.fit(wrapped(), fresh(), **plan, callbacks=callbacks, run_dir=tmp_path)
    assert [record["loss"] for record in run.evaluations] == [x["loss"] for x in seen]
    assert all(x["loss"] > 0 and "table" not in x for x in run.evaluations)
    assert run.metrics["step"] == 4
    assert jddp.fit(wrapped(), fresh(), **plan, run_dir=tmp_path).step == 4
