"""A mask is 0 or 1: weights in its place are refused on the host, and on a device count once."""

import jax
import numpy as np
import optax
import pytest
from judge import host
from states import equal
from sweeps import swept
from tiny import MLP, loss_fn, make_batch

import jddp


def as_mean(model, batch, train):
    losses, metrics = loss_fn(model, batch, train)
    return jddp.Mean(losses, np.ones(losses.shape, np.float32)), metrics


def fractional():
    mask = np.ones(16, np.float32)
    mask[3:9] = 0.5
    mask[9:11] = 0
    return make_batch() | {"mask": mask}


CALLS = {
    "step": lambda ddp, state: ddp.step(state, fractional()),
    "evaluate": lambda ddp, state: ddp.evaluate(state, [fractional()]),
    "fit": lambda ddp, state: jddp.fit(ddp, [fractional()], num_steps=1),
    "pad": lambda ddp, state: ddp.pad(fractional()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_weights_in_the_place_of_a_mask_are_refused(call):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2)
    state = ddp.init(0, make_batch())
    with pytest.raises(jddp.Error, match=r"'mask'\] holds 0.5: a mask is 1 .* jddp.Mean") as caught:
        call(ddp, state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", swept([loss_fn, as_mean], every=2), ids=["losses", "mean"])
def test_on_a_device_every_number_above_zero_counts_once(loss):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss, mesh=2)
    ends = []
    for batch in (fractional(), fractional() | {"mask": fractional()["mask"] > 0}):
        placed = jax.device_put(batch, jax.NamedSharding(ddp.mesh, jax.P("data")))
        state, metrics = ddp.step(ddp.init(0, placed), placed)
        ends.append(host((state.params, metrics)))
    equal(*ends)
    assert ends[0][1]["count"] == 14


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_a_mask_may_be_of_any_dtype(dtype):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2)
    batch = make_batch() | {"mask": (np.arange(16) < 11).astype(dtype)}
    assert ddp.step(ddp.init(0, batch), batch)[1]["count"] == 11
