"""A batch may bring a function of its rows, which the step runs on the devices."""

import jax
import optax
import pytest
from states import copied, equal
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.ground.typing import TRANSFORM


class Doubled:
    """Makes `x` of `half`."""

    def __call__(self, rows):
        return {"x": 2 * rows["half"], "y": rows["y"]} | {
            k: rows[k] for k in ("mask",) if k in rows
        }

    def __eq__(self, other):
        return isinstance(other, Doubled)

    def __hash__(self):
        return 0


def halves(rows=16, **options):
    """A batch, and the same one whose function is still to run."""
    whole = make_batch(rows, **options)
    half = {name: x for name, x in whole.items() if name != "x"} | {"half": whole["x"] / 2}
    return whole, half | {TRANSFORM: Doubled()}


OPTIONS = [
    {},
    {"strategy": "fsdp"},
    {"accumulate_steps": 2},
    {"reduction": jddp.Reduction(overlap=False), "ema_decay": 0.9},
    {"strategy": jddp.LogicalReplicas(8)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_equals_the_step_on_rows_that_are_already_transformed(options):
    ddp = jddp.DataParallel(MLP(), optax.adamw(1e-2), loss_fn, mesh=4, **options)
    whole, half = halves()
    start = ddp.init(0, whole)
    copy = copied(start)
    want, _ = ddp.step(start, whole)
    got, _ = ddp.step(copy, half)
    equal(got.params, want.params)  # twice a half is exact


def test_evaluation_prediction_and_padding_transform_rows_too():
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=4)
    whole, half = halves(14)
    state = ddp.init(0, ddp.pad(half))
    equal(state.params, ddp.init(0, ddp.pad(whole)).params)
    equal(ddp.evaluate(state, [half]), ddp.evaluate(state, [whole]))
    equal(ddp.predict(state, [half]), ddp.predict(state, [whole]))
    copy = copied(state)
    want, _ = ddp.step(state, ddp.pad(whole))
    equal(ddp.step(copy, ddp.pad(half))[0].params, want.params)


def test_equal_functions_compile_one_step(caplog):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2)
    _, half = halves()
    state = ddp.init(0, half)
    state, _ = ddp.step(state, half)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(2):
            state, _ = ddp.step(state, ddp.shard_batch(half | {TRANSFORM: Doubled()}))
    assert not [line for line in caplog.messages if "Compiling jit(step)" in line]
