"""N devices equal one device on the whole batch."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from judge import PLACES, assert_close_step, joined
from oracle import on_one_device, vmapped_step, whole_batch_step
from tiny import MODELS, loss_fn, make_batch

import jddp

SETTINGS = {
    "model": list(MODELS),
    "replicas": [1, 2, 4, 8],
    "place": list(PLACES),
    "dtype": ["float32", "bfloat16"],
    "masked": [False, True],
    "dropout": [0.0, 0.3],
}


def covering(settings):
    """A few cases in which all values of any two settings stand once together."""

    def covered(case):
        return set(itertools.combinations(enumerate(case), 2))

    product = list(itertools.product(*settings.values()))
    missing = set().union(*map(covered, product))
    while missing:
        best = max(product, key=lambda case: len(covered(case) & missing))
        missing -= covered(best)
        yield best


# Sums of 16 rows in another order; a replica rounds its share's gradient to 8 bits where one device
# rounds the whole batch's once.
RTOL = {"float32": 1e-5, "bfloat16": 2**-6}


# Each pair of settings, on two devices and on eight; all 320 cases are long tests.
PAIRS = list(covering({**SETTINGS, "replicas": [2, 8]}))


def mark_of(case):
    """The mark of a case by how often it runs; none for every second of those of pairs."""
    if case in PAIRS[::4]:
        return []
    return pytest.mark.slow if case in PAIRS else pytest.mark.long


CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=mark_of(case))
    for case in itertools.product(*SETTINGS.values())
]


@pytest.mark.parametrize(list(SETTINGS), CASES)
def test_n_devices_equal_one_device_for_every_pair_of_settings(
    model, replicas, place, dtype, masked, dropout
):
    module = MODELS[model](dtype=jnp.dtype(dtype), dropout_rate=dropout)
    optimizer = optax.sgd(0.5, momentum=0.9)
    # Buckets of 200 bytes: several, with leaves larger than one.
    options = joined(
        {"mesh": replicas, "reduction": jddp.Reduction(bucket_mb=200 / 2**20)}, PLACES[place]
    )
    ddp = jddp.DataParallel(module, optimizer, loss_fn, **options)
    batch = make_batch(masked=masked)
    state = ddp.init(seed=1, batch=batch)
    whole = whole_batch_step(module, optimizer, loss_fn)
    judge = vmapped_step(ddp, replicas, batch) if dropout else whole
    for step in range(2):
        batch = make_batch(seed=step, masked=masked)
        before = on_one_device(state)
        want, want_metrics = judge(before, batch)
        state, metrics = ddp.step(state, batch)
        assert_close_step(on_one_device(state), want, before, rtol=RTOL[dtype])
        for key in ("loss", "accuracy"):
            np.testing.assert_allclose(metrics[key], want_metrics[key], rtol=RTOL[dtype])
        assert metrics["count"] == batch.get("mask", np.ones(16)).sum()
