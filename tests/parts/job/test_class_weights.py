"""Class weights: the weighted mean of PyTorch, over all replicas, from a key of the config."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import jddp
from jddp.config.files import read_yaml, with_overrides
from jddp.config.schema import Config
from jddp.data.examples import ArrayExamples, labels_of
from jddp.data.row_examples import RowExamples
from jddp.errors import ConfigError, DataError
from jddp.job.class_weights import balanced_weights, weighted
from jddp.job.job import build, train
from jddp.runs.opened import open_run
from jddp.zoo.losses import cross_entropy

pytestmark = pytest.mark.usefixtures("started_devices")

LABELS = np.array([0] * 12 + [1] * 3 + [2], np.int32)
WEIGHTS = [0.5, 2.0, 5.0]


def by_hand(logits, labels, weights):
    """The formula of torch.nn.CrossEntropyLoss(weight=weights), in float64."""
    logits = np.asarray(logits, np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]
    of_rows = np.array(weights)[labels]
    return (of_rows * losses).sum() / of_rows.sum()


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_loss_is_the_weighted_mean_of_pytorch_however_classes_are_spread(num_devices):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    batch = {"x": x, "label": LABELS}  # with eight devices only two of them have rare classes
    ddp = jddp.DataParallel(
        nn.Dense(3), optax.sgd(1.0), weighted(cross_entropy, WEIGHTS), mesh=num_devices
    )
    state = ddp.init(seed=0, batch=batch)
    before = jax.device_get(state.params)
    logits = x @ before["kernel"] + before["bias"]
    padded = ddp.evaluate(state, [batch, {"x": x[:3], "label": LABELS[-3:]}])
    want = by_hand(np.r_[logits, logits[:3]], np.r_[LABELS, LABELS[-3:]], WEIGHTS)
    assert padded["loss"] == pytest.approx(want, rel=1e-5)

    state, metrics = ddp.step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(by_hand(logits, LABELS, WEIGHTS), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx((logits.argmax(-1) == LABELS).mean())
    of_rows = np.array(WEIGHTS)[LABELS]
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) - np.eye(3)[LABELS]
    gradient = (of_rows[:, None] * shares).sum(0) / of_rows.sum()
    np.testing.assert_allclose(before["bias"] - state.params["bias"], gradient, rtol=1e-4)


def test_balanced_weights_give_each_class_the_same_sum():
    weights = balanced_weights(LABELS)
    assert weights == pytest.approx([16 / 36, 16 / 9, 16 / 3])
    np.testing.assert_allclose(np.bincount(LABELS, np.array(weights)[LABELS]), 16 / 3)
    with pytest.raises(DataError, match="class 3 has no training example"):
        balanced_weights(LABELS, 4)


def test_labels_are_an_attribute_of_examples_or_read_from_them():
    rows = [{"x": 1.0, "label": int(label)} for label in LABELS]
    np.testing.assert_array_equal(labels_of(RowExamples(rows)), LABELS)
    np.testing.assert_array_equal(labels_of(ArrayExamples({"label": LABELS})), LABELS)


@pytest.fixture
def config(tmp_path):
    for part in ("train", "test"):
        images = np.zeros((16, 8, 8, 1), np.uint8)
        np.save(tmp_path / f"{part}_images.npy", images)
        np.save(tmp_path / f"{part}_labels.npy", LABELS)
    shape = {"image_size": 8, "num_channels": 1, "num_classes": 3}
    return Config(
        data={"name": "npy", "dir": str(tmp_path), "global_batch_size": 16, "kwargs": shape},
        model={"name": "mlp", "kwargs": {"widths": [4], "num_outputs": 3}},
        loss={"class_weights": "balanced"},
        train={"num_steps": 1},
        run={"dir": str(tmp_path / "run")},
    )


def test_a_run_keeps_its_balanced_weights_and_evaluates_with_them(config):
    run = train(config)
    kept = read_yaml(run.run_dir / "config.yaml")["loss"]["class_weights"]
    assert kept == pytest.approx([16 / 36, 16 / 9, 16 / 3])
    opened = open_run(run.run_dir)
    logits = opened.predict([{"image": np.zeros((16, 8, 8, 1), np.float32) - 1}])
    assert opened.evaluate()["loss"] == pytest.approx(by_hand(logits, LABELS, kept), rel=1e-5)
    assert train(config).step == 1  # the same config again resumes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss.class_weights": [1, 2]}, "2 weights for 3 classes"),
        ({"loss.class_weights": [1, 2, -1]}, "loss.class_weights"),
        ({"loss.name": "mean_squared_error", "loss.class_weights": "balanced"}, "cross_entropy"),
        ({"data.mixup": 0.2}, "cannot be combined"),
    ],
)
def test_weights_that_do_not_fit_are_refused(config, keys, message):
    with pytest.raises(ConfigError, match=message):
        build(with_overrides(config, keys))
