"""PyTorch's data sets and loaders, taken as they are."""

import jax
import numpy as np
import optax
import pytest
from tiny import MLP, make_batch
from tiny import loss_fn as loss_of

import jddp
from jddp.data import RowExamples, TrainBatches

pytestmark = pytest.mark.slow  # Needs jddp[peers].

ROWS = make_batch(32)


def loss_fn(model, batch, train):
    return loss_of(model, {"x": batch[0], "y": batch[1]}, train)


@pytest.fixture(scope="module")
def tensors():
    import torch

    return torch.utils.data.TensorDataset(*map(torch.from_numpy, (ROWS["x"], ROWS["y"])))


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_data_set_gives_the_rows_that_arrays_give(tensors):
    examples = RowExamples(tensors, names=("x", "y"))
    got = next(TrainBatches(examples, global_batch_size=8, seed=0))
    order = next(
        TrainBatches(RowExamples([{"i": i} for i in range(32)]), global_batch_size=8, seed=0)
    )
    np.testing.assert_array_equal(got["x"], ROWS["x"][order["i"]])
    np.testing.assert_array_equal(got["y"], ROWS["y"][order["i"]])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_trains_and_is_evaluated_as_arrays_are(tensors, num_workers):
    import torch

    options = {"num_workers": num_workers, "batch_size": 8}
    # Forked workers would share the locks of JAX's threads.
    options |= {"multiprocessing_context": "spawn"} if num_workers else {}
    loader = torch.utils.data.DataLoader(tensors, **options)
    arrays = [
        (ROWS["x"][i : i + 8], ROWS["y"][i : i + 8].astype(np.int32)) for i in range(0, 32, 8)
    ]
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=4)
    got = ddp.fit(loader, num_steps=4, evaluate=loader)
    want = ddp.fit(arrays, num_steps=4, evaluate=arrays)
    assert_same(got.state.params, want.state.params)
    assert got.eval_metrics == want.eval_metrics


def test_a_tensor_steps_as_an_array_does(tensors):
    batch = tensors[:16]
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=4)
    got, _ = ddp.step(ddp.init(0, batch), batch)
    arrays = tuple(np.asarray(x) for x in batch)
    want, _ = ddp.step(ddp.init(0, arrays), arrays)
    assert_same(got.params, want.params)
