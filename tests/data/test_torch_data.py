"""PyTorch's data sets and loaders, taken as they are."""

import optax
import pytest
from states import equal
from tiny import MLP, make_batch
from tiny import loss_fn as loss_of

import jddp

pytestmark = pytest.mark.slow  # Needs jddp[peers].

ROWS = make_batch(32)


def loss_fn(model, batch, train):
    return loss_of(model, {"x": batch[0], "y": batch[1]}, train)


@pytest.fixture(scope="module")
def tensors():
    import torch

    return torch.utils.data.TensorDataset(*map(torch.from_numpy, (ROWS["x"], ROWS["y"])))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_trains_and_is_evaluated_as_arrays_are(tensors, num_workers):
    import torch

    options = {"num_workers": num_workers, "batch_size": 8}
    # Forked workers would share the locks of JAX's threads.
    options |= {"multiprocessing_context": "spawn"} if num_workers else {}
    loader = torch.utils.data.DataLoader(tensors, **options)
    arrays = [(ROWS["x"][i : i + 8], ROWS["y"][i : i + 8]) for i in range(0, 32, 8)]
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=4)
    got = jddp.fit(ddp, loader, num_steps=4, evaluate=loader)
    want = jddp.fit(ddp, arrays, num_steps=4, evaluate=arrays)
    equal(got.state.params, want.state.params)
    assert got.eval_metrics == want.eval_metrics
    ddp.step(ddp.init(0, tensors[:16]), tensors[:16])
