"""Columns of a batch that a device cannot hold: left out where no loss reads them, else refused."""

import datetime
import logging

import jax
import numpy as np
import pytest
from states import equal
from sweeps import swept
from tiny import loss_fn, make_batch, wrapped

import jddp
from jddp.ground.errors import ConfigError, DataError
from jddp.modules.rows import LEFT_OUT

NUM_ROWS = 8
COLUMNS = {
    "text": ["a"] * NUM_ROWS,
    "array of text": np.array(["a", "bc"] * 4),
    "bytes": np.array([b"a"] * NUM_ROWS),
    "dates": np.array(["2026-01-01"] * NUM_ROWS, "datetime64[D]"),
    "objects": np.array([datetime.date(2026, 1, 1)] * NUM_ROWS),
    "unequal rows": [[1], [1, 2]] * 4,
}


def calls(ddp, state, batch):
    return {
        "step": lambda: ddp.step(state, batch),
        "evaluate": lambda: ddp.evaluate(state, [batch]),
        "fit": lambda: jddp.fit(ddp, [batch], num_steps=1),
        "evaluate of fit": lambda: jddp.fit(ddp, [make_batch()], num_steps=1, evaluate=[batch]),
    }


@pytest.fixture(autouse=True)
def nothing_was_reported():
    LEFT_OUT.clear()


@pytest.mark.parametrize("column", swept(COLUMNS, every=3))
def test_a_column_without_numbers_is_left_out_with_one_notice(column, caplog):
    ddp, batch = wrapped(), make_batch(NUM_ROWS)
    state = ddp.init(0, batch)
    want = ddp.evaluate(state, [batch])
    with caplog.at_level(logging.WARNING, "jddp"):
        for name, call in calls(ddp, state, {**batch, "extra": column}).items():
            if name != "step":  # which would take the state
                found = call()
                assert name != "evaluate" or found == want
    notices = [x.getMessage() for x in caplog.records if "left out" in x.getMessage()]
    assert len(notices) == 1
    assert notices[0].startswith("batch['extra'] holds ")


@pytest.mark.parametrize("name", ["text", "unequal rows"])
def test_a_column_without_numbers_that_the_loss_reads_is_refused_by_name(name):
    batch = make_batch(NUM_ROWS)
    ddp = wrapped(loss=lambda m, b, train: loss_fn(m, b, train)[0] + (b["extra"] != 0))
    state = ddp.init(0, {**batch, "extra": np.zeros(NUM_ROWS, np.float32)})
    for call in calls(ddp, state, {**batch, "extra": COLUMNS[name]}).values():
        with pytest.raises(ConfigError, match=r"reads batch\['extra'\], which holds .*Encode it"):
            call()


def test_numbers_that_need_64_bits_are_refused_and_others_are_narrowed():
    ddp, batch = wrapped(), make_batch(NUM_ROWS)
    state = ddp.init(0, batch)
    for number, dtype in ((-(2**31) - 1, np.int64), (2**32, np.uint64)):
        ids = np.array([0] * 7 + [number], dtype)
        for call in calls(ddp, state, {**batch, "id": ids}).values():
            with pytest.raises(DataError, match=rf"^batch\['id'\] holds {number}"):
                call()
    widest = np.array([2**31 - 1] * 7 + [-(2**31)])
    assert ddp.evaluate(state, [{**batch, "id": widest}]) == ddp.evaluate(state, [batch])


def test_lists_other_byte_orders_and_masked_arrays_are_read_as_they_are_meant():
    ddp, batch = wrapped(), make_batch(NUM_ROWS)
    state = ddp.init(0, batch)
    want = ddp.evaluate(state, [batch])
    x, y = batch["x"], batch["y"]
    for given in (
        {"x": x.astype(">f4"), "y": y},
        {"x": x.tolist(), "y": y.tolist()},
        {"x": np.ma.MaskedArray(x, False), "y": y},
    ):
        assert ddp.evaluate(state, [given]) == want
    with pytest.raises(DataError, match=r"^batch\['x'\] is a masked array.*batch\['mask'\]"):
        ddp.evaluate(state, [{"x": np.ma.MaskedArray(x, x == x.max()), "y": y}])


def test_keys_are_rows_as_numbers_are():
    def draws(model, batch, train):
        return loss_fn(model, batch, train)[0] * 0 + jax.vmap(jax.random.uniform)(batch["key"])

    ddp, keys = wrapped(loss=draws), jax.random.split(jax.random.key(0), NUM_ROWS - 1)
    batch = {**make_batch(NUM_ROWS - 1), "key": keys}  # which do not divide over two devices
    state = ddp.init(0, {**make_batch(NUM_ROWS), "key": jax.random.split(keys[0], NUM_ROWS)})
    want = float(jax.vmap(jax.random.uniform)(keys).mean())
    assert ddp.evaluate(state, [batch])["loss"] == pytest.approx(want, rel=1e-6)


def test_a_batch_of_no_numbers_at_all_is_refused():
    with pytest.raises(DataError, match="no column of the batch holds numbers: a, b"):
        wrapped().init(0, {"a": ["x"], "b": [b"y"]})
    with pytest.raises(DataError, match="the batch holds text"):
        wrapped().init(0, (np.array(["x"]), np.ones(1)))


@pytest.mark.slow  # Needs jddp[peers].
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_of_pytorch_trains_and_is_evaluated_as_arrays_are(num_workers):
    import torch

    rows = make_batch(32)
    tensors = torch.utils.data.TensorDataset(*map(torch.from_numpy, (rows["x"], rows["y"])))
    options = {"num_workers": num_workers, "batch_size": 8}
    # Forked workers would share the locks of JAX's threads.
    options |= {"multiprocessing_context": "spawn"} if num_workers else {}
    loader = torch.utils.data.DataLoader(tensors, **options)
    arrays = [(rows["x"][i : i + 8], rows["y"][i : i + 8]) for i in range(0, 32, 8)]
    ddp = wrapped(loss=lambda m, b, train: loss_fn(m, {"x": b[0], "y": b[1]}, train), mesh=4)
    got = jddp.fit(ddp, loader, num_steps=4, evaluate=loader)
    want = jddp.fit(ddp, arrays, num_steps=4, evaluate=arrays)
    equal(got.state.params, want.state.params)
    assert got.eval_metrics == want.eval_metrics
    ddp.step(ddp.init(0, tensors[:16]), tensors[:16])
