"""Models of others, changed in nothing, train on eight devices as on one."""

import contextlib
from pathlib import Path

import models
import numpy as np
import optax
import pytest
from judge import PLACES, assert_close_step, assert_same_on_all_devices, joined
from models import GALLERY
from oracle import on_one_device, one_device_step
from states import assert_same, copied

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder

REPLICAS, ROWS = 8, 16
SOURCES = sorted(set(Path(models.__file__).parent.glob("*.py")) - {Path(models.__file__)})

# float32: 16 rows are summed in another order, and so are squares in batch norms.
RTOL = 1e-5

# Linen and NNX, statistics and random numbers beside the parameters, and parameters of two names.
QUICK = {"vae", "tied_autoencoder"}


def for_each_example(mark):
    """Parametrizes by all, of which those that are not quick have a mark."""
    examples = [
        pytest.param(example, marks=[] if name in QUICK else mark, id=name)
        for name, example in GALLERY.items()
    ]
    return pytest.mark.parametrize("example", examples)


def train_beside_one_device(example, place):
    """Two steps on eight devices and on one, compared; returns the wrapper and its last state."""
    batches = [example.make_batch(ROWS, seed) for seed in range(2)]
    # Buckets of 1 KiB: several, with leaves larger than one.
    options = joined(
        {"mesh": REPLICAS, "reduction": jddp.Reduction(bucket_mb=2**-10)},
        PLACES[place],
        example.options,
    )
    optimizer = optax.sgd(0.1, momentum=0.9)
    ddp = jddp.DataParallel(example.model(), optimizer, example.loss_fn, **options)
    state = ddp.init(0, batches[0])
    judge = one_device_step(ddp, example.model(), example.loss_fn, batches[0])
    for batch in batches:
        before = on_one_device(state)
        want, want_metrics = judge(before, batch)
        state, metrics = ddp.step(state, batch)
        assert_close_step(on_one_device(state), want, before, rtol=RTOL)
        for name, value in want_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=RTOL, err_msg=name)
    assert_same_on_all_devices(state)
    return ddp, state


@pytest.mark.slow
@for_each_example(pytest.mark.long)
def test_eight_devices_train_a_model_as_one_does_with_reductions_at_the_end(example):
    train_beside_one_device(example, "leaf-end")


@for_each_example(pytest.mark.slow)
def test_eight_devices_train_evaluate_and_resume_a_model_as_one_does(example, tmp_path):
    ddp, state = train_beside_one_device(example, "flat-ready")
    # A loss that is one number cannot leave out rows that fill up the devices.
    sizes = (
        (16, 16) if "loss" in ddp.steps.planned(example.make_batch(16, 16)).scalars else (16, 16, 5)
    )
    before = copied(state)
    evaluated = ddp.evaluate(state, [example.make_batch(rows, rows) for rows in sizes])
    assert evaluated["examples"] == sum(sizes)
    assert np.isfinite(list(evaluated.values())).all()
    assert_same(state, before)

    with contextlib.closing(CheckpointFolder(tmp_path, keep=1)) as checkpoints:
        checkpoints.save(2, state, {})
        restored = checkpoints.restore(like=state).state
    last = example.make_batch(ROWS, seed=2)
    want, _ = ddp.step(state, last)
    got, _ = ddp.step(restored, last)
    assert_same(got, want)


def test_the_gallery_shows_every_model_and_no_model_knows_of_replicas():
    assert [path.stem for path in SOURCES] == sorted(GALLERY)
    for path in SOURCES:
        for word in ("jddp", "axis_name", "pmean", "psum"):
            assert word not in path.read_text(), path
