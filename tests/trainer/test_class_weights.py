"""Class weights: the weighted mean of PyTorch, over all replicas, from a key of the config."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import jddp
from jddp.config.files import read_yaml, with_overrides
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, DataError
from jddp.trainer.job.build import build, train
from jddp.trainer.runs.opened import open_run
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


def weighted_loss(model, batch, train):
    return cross_entropy(model, batch, train, class_weights=WEIGHTS)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_loss_is_the_weighted_mean_of_pytorch_however_classes_are_spread(num_devices):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    batch = {"x": x, "label": LABELS}  # with eight devices only two of them have rare classes
    ddp = jddp.DataParallel(nn.Dense(3), optax.sgd(1.0), weighted_loss, mesh=num_devices)
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


def test_smoothed_targets_are_weighed_by_class_as_in_pytorch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(16, 3)).astype(np.float32), rng.integers(0, 3, 16)
    batch = {"x": logits, "label": labels}
    for smoothing in (0.0, 0.1, 0.5):
        mean, _ = cross_entropy(
            lambda x: x, batch, True, label_smoothing=smoothing, class_weights=WEIGHTS
        )
        judge = torch.nn.CrossEntropyLoss(torch.tensor(WEIGHTS), label_smoothing=smoothing)
        want = judge(torch.tensor(logits), torch.tensor(labels)).item()
        # Sums of sixteen terms in float32, in another order.
        assert float(mean.total.sum() / mean.count.sum()) == pytest.approx(want, rel=1e-6)
    wider = {"x": np.pad(logits, ((0, 0), (0, 1))), "label": labels}
    mean, _ = cross_entropy(lambda x: x, wider, True, label_smoothing=0.1, class_weights=WEIGHTS)
    assert np.isfinite(mean.total).all()  # an output that no class has


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


def test_balanced_weights_of_rows_without_a_class_or_all_masked_out_are_refused(tmp_path):
    with pytest.raises(DataError, match="class 0 has no training example"):
        build(arrays_in(tmp_path, mask=np.zeros(1000)))
    with pytest.raises(DataError, match="1,000 labels are negative"):
        build(arrays_in(tmp_path, label=np.full(1000, -1)))
    with pytest.raises(ConfigError, match="have no classes"):
        build(arrays_in(tmp_path, label=np.zeros((1000, 2), int)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss.kwargs": {"class_weights": [1, 2, 3]}}, "as loss.class_weights"),
        ({"loss.class_weights": [1, 2]}, "2 weights for 3 classes"),
        ({"loss.class_weights": [1, 2, -1]}, "loss.class_weights"),
        ({"loss.name": "mean_squared_error", "loss.class_weights": "balanced"}, "cross_entropy"),
        ({"data.transforms": [{"name": "mix", "kwargs": {"mixup": 0.2}}]}, "cannot be combined"),
    ],
)
def test_weights_that_do_not_fit_are_refused(config, keys, message):
    with pytest.raises(ConfigError, match=message):
        build(with_overrides(config, keys))


def arrays_in(folder, **train):
    """A config of train.npz and test.npz, of 100 rows of class 1 among 1,000."""
    label = (np.arange(1000) < 100).astype(np.int32)
    rows = {"x": np.zeros((1000, 2), np.float32), "label": label}
    np.savez(folder / "train.npz", **(rows | train))
    np.savez(folder / "test.npz", **rows)
    return Config(
        data={"name": "npz", "dir": str(folder), "global_batch_size": 1000},
        model={"name": "mlp", "kwargs": {"num_outputs": 2}},
        loss={"class_weights": "balanced"},
        mesh={"num_devices": 1},
        train={"num_steps": 1},
    )


def sums_of_weights(job):
    """The sum of the weights of the rows that an epoch takes, of each class."""
    batch = next(job.plain_batches())
    counts = np.bincount(batch["label"], batch.get("mask"))
    return counts * np.array(job.config.loss.class_weights)


@pytest.mark.parametrize("rare", [1.0, 3.0, 9.0])
def test_balanced_weights_count_the_rows_that_sample_weights_take(tmp_path, rare):
    made = arrays_in(tmp_path)
    np.save(tmp_path / "weights.npy", np.where(np.arange(1000) < 100, rare, 1.0))
    job = build(with_overrides(made, {"data.sample_weights": str(tmp_path / "weights.npy")}))
    # A class is taken as often as its weight demands, to one row.
    one, other = sums_of_weights(job)
    assert one == pytest.approx(other, rel=0.01)


def test_balanced_weights_count_the_shares_of_a_mixture(tmp_path):
    for folder, label in (("few", 1), ("many", 0)):
        (tmp_path / folder).mkdir()
        num_rows = {"few": 100, "many": 900}[folder]
        rows = {"x": np.zeros((num_rows, 2), np.float32), "label": np.full(num_rows, label)}
        for part in ("train", "test"):
            np.savez(tmp_path / folder / f"{part}.npz", **rows)
    parts = [{"dir": str(tmp_path / "few"), "weight": 0.5}]
    parts += [{"dir": str(tmp_path / "many"), "weight": 0.5}]
    made = with_overrides(arrays_in(tmp_path), {"data.dir": None, "data.mixture": parts})
    job = build(made)
    assert job.config.loss.class_weights == pytest.approx([1, 1])
    one, other = sums_of_weights(job)
    assert one == pytest.approx(other, rel=1e-12)  # 900 times 5/9, in float64


def test_balanced_weights_leave_out_rows_whose_mask_is_0(tmp_path):
    label = np.arange(1000) % 2
    label[800:] = -1
    made = arrays_in(tmp_path, label=label, mask=(np.arange(1000) % 4 != 1) & (label >= 0))
    job = build(made)  # 400 of class 0, 200 of class 1
    assert job.config.loss.class_weights == pytest.approx([0.75, 1.5])
