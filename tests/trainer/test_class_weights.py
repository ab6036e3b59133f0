"""Class weights: the weighted mean of PyTorch, over all replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jddp
from jddp.ground.errors import ConfigError
from jddp.zoo.losses import cross_entropy

pytestmark = pytest.mark.usefixtures("started_devices")

LABELS = np.array([0] * 12 + [1] * 3 + [2], np.int32)
WEIGHTS = [0.5, 2.0, 5.0]


def weighted_mean(logits, labels):
    """The formula of torch.nn.CrossEntropyLoss(weight=WEIGHTS)."""
    of_rows = jnp.array(WEIGHTS)[labels]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (of_rows * losses).sum() / of_rows.sum()


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_loss_is_the_weighted_mean_of_pytorch_however_classes_are_spread(num_devices):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    batch = {"x": x, "label": LABELS}  # with eight devices only two of them have rare classes
    loss = functools.partial(cross_entropy, class_weights=WEIGHTS)
    ddp = jddp.DataParallel(nn.Dense(3), optax.sgd(1.0), loss, mesh=num_devices)
    state = ddp.init(seed=0, batch=batch)
    before = jax.device_get(state.params)
    logits = x @ before["kernel"] + before["bias"]
    padded = ddp.evaluate(state, [batch, {"x": x[:3], "label": LABELS[-3:]}])
    want = weighted_mean(np.r_[logits, logits[:3]], np.r_[LABELS, LABELS[-3:]])
    assert padded["loss"] == pytest.approx(want, rel=1e-5)
    state, metrics = ddp.step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(weighted_mean(logits, LABELS), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx((logits.argmax(-1) == LABELS).mean())
    moved = np.zeros((1, 3), np.float32)
    (gradient,) = jax.grad(lambda bias: weighted_mean(logits + bias, LABELS))(moved)
    np.testing.assert_allclose(before["bias"] - state.params["bias"], gradient, rtol=1e-4)


def test_smoothed_targets_are_weighed_by_class_as_in_pytorch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(16, 3)).astype(np.float32), rng.integers(0, 3, 16)
    batch = {"x": logits, "label": labels}
    for smoothing in (0.0, 0.1, 0.5):
        kwargs = {"label_smoothing": smoothing, "class_weights": WEIGHTS}
        mean, _ = cross_entropy(lambda x: x, batch, True, **kwargs)
        judge = torch.nn.CrossEntropyLoss(torch.tensor(WEIGHTS), label_smoothing=smoothing)
        want = judge(torch.tensor(logits), torch.tensor(labels)).item()
        # Sums of sixteen terms in float32, in another order.
        assert float(mean.total.sum() / mean.count.sum()) == pytest.approx(want, rel=1e-6)
    wider = {"x": np.pad(logits, ((0, 0), (0, 1))), "label": labels}
    mean, _ = cross_entropy(lambda x: x, wider, True, label_smoothing=0.1, class_weights=WEIGHTS)
    assert np.isfinite(mean.total).all()  # an output that no class has
    mixed = wider | {"other_label": labels}
    with pytest.raises(ConfigError, match="class_weights"):
        cross_entropy(lambda x: x, mixed, True, class_weights=WEIGHTS)
