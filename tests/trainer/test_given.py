"""Rows that are the same on several processes are told from rows that only look alike."""

import jax
import numpy as np
import pytest

from jddp.data import Order, TrainBatches, eval_batches
from jddp.data.batches import Share
from jddp.distributed import coordination
from jddp.ground.errors import ConfigError
from jddp.trainer.prefetch import digest_of_rows

rng = np.random.default_rng(0)
NOISE = rng.standard_normal((4, 3), np.float32)


ALIKE = {
    "constant": {"x": np.ones((8, 32, 32, 3), np.float32)},  # synthetic
    "one row": {"x": np.repeat(NOISE[:1], 80, 0), "y": np.zeros(80)},  # again and again
    "few": {"x": np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), "y": np.array([0, 1, 1, 0])},  # all
    "no rows": {"x": np.zeros((0, 3), np.float32)},
    "a scalar": {"x": np.float32(3)},
    "nothing": (),
}
OTHERS = {
    "floats": {"x": rng.standard_normal((8, 30), np.float32)},
    "one row": {"x": rng.standard_normal((1, 8, 8), np.float32)},  # a large one of each process
    "bits": (rng.integers(2, size=(64, 8)), np.ones(64)),
    "on a device": {"x": jax.numpy.asarray(np.concatenate([NOISE] * 9))},
    "bfloat16": {"x": jax.numpy.arange(96, dtype=jax.numpy.bfloat16)},
}


@pytest.mark.parametrize("batch", ALIKE.values(), ids=ALIKE)
def test_rows_that_are_alike_or_few_and_small_show_nothing(batch):
    assert digest_of_rows(batch) == ""


@pytest.mark.parametrize("batch", OTHERS.values(), ids=OTHERS)
def test_other_rows_have_a_digest_which_no_other_batch_has(batch):
    digest = digest_of_rows(batch)
    assert digest == digest_of_rows(jax.tree.map(lambda x: x[:], batch)) != ""
    changed = jax.tree.map(lambda x: x[:-1], batch)
    assert digest not in (digest_of_rows(changed), digest_of_rows({"other": batch}))


def test_batches_read_the_share_of_their_process_once_jax_has_joined_a_job(monkeypatch):
    rows = {"x": np.arange(24)}

    def shares(**given):
        made = TrainBatches(rows, global_batch_size=8, seed=0, **given)
        return [made.share, eval_batches(rows, global_batch_size=8, **given).share]

    assert shares() == [Share(0, 1)] * 2
    monkeypatch.setattr(coordination, "num_processes", lambda: 4)
    monkeypatch.setattr(coordination, "process_index", lambda: 3)
    assert shares() == [Share(3, 4)] * 2
    assert shares(process_index=1) == [Share(1, 4)] * 2
    assert shares(process_index=0, num_processes=1) == [Share(0, 1)] * 2
    mine = next(TrainBatches(rows, global_batch_size=8, order=Order(24, 0, shuffle=False)))
    assert mine["x"].tolist() == [6, 7]
    with pytest.raises(ConfigError, match="process_index=3 must be from 0 up, and below num_pro"):
        shares(num_processes=2)


def test_batches_are_made_without_a_look_for_devices(monkeypatch):
    def devices(*_):
        raise AssertionError("a backend was initialized")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax, "process_index", devices)
    monkeypatch.setattr(jax, "process_count", devices)
    TrainBatches({"x": np.arange(8)}, global_batch_size=8, seed=0)
    eval_batches({"x": np.arange(8)}, global_batch_size=8)
