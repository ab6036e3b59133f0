"""A config lists the transforms of its rows."""

import numpy as np
import pytest

import jddp
from jddp.config.files import load_config
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.ground.typing import TRANSFORM
from jddp.modules.rows import transformed
from jddp.trainer.job.build import build


def job_with(*overrides, **data):
    listed = [f"data.{name}={value}" for name, value in data.items()]
    config, _ = load_config(["fashion_mnist_cnn"], ["mesh.num_devices=2", *listed, *overrides])
    return build(config)


def test_listed_transforms_take_the_place_of_those_of_the_data_set():
    batch = next(job_with(transforms="[{name: crop_and_flip}]").train_batches())
    assert batch["draws"].shape[1] == 5
    none = next(job_with(transforms="[]").train_batches())
    assert none.keys() - {"mask"} == {"image", "label", TRANSFORM}  # which normalizes


@pytest.mark.slow
def test_a_transform_without_random_numbers_is_for_evaluation_too(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (32, 28, 28, 1), dtype=np.uint8)
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", image=images, label=np.arange(32) % 3)
    normalized = {"name": "normalize", "kwargs": {"mean": 0.5, "std": 0.5}}
    listed = [normalized, {"name": "flip_and_shift"}]
    data = {"name": "npz", "dir": str(tmp_path), "global_batch_size": 8, "kwargs": {}}
    run = jddp.train(
        "fashion_mnist_cnn",
        data=data | {"transforms": listed},
        train={"num_steps": 2, "num_epochs": None},
        mesh={"num_devices": 2},
        run={"dir": str(tmp_path / "run")},
    )
    sent = next(iter(run.test_batches))
    assert sent["image"].dtype == np.uint8
    rows = transformed(sent)["image"]
    np.testing.assert_allclose(rows, images[: len(rows)] / 127.5 - 1, atol=1e-6)


FLIP, NORMALIZE = {"name": "flip_and_shift"}, {"name": "normalize"}
REFUSED = [
    ({"name": "crop_and_flips"}, r"data.transforms\[0\].name: .*'crop_and_flip'"),
    ({"name": "crop_and_flip", "kwargs": {"smallst": 1}}, r"\[0\].kwargs.*'smallest'"),
    (NORMALIZE, "images of fashion_mnist are float32 .*Leave it out"),
    (FLIP, "change images, and python_stdlib has tokens"),
]


@pytest.mark.parametrize("listed, message", REFUSED)
def test_transforms_that_are_unknown_or_of_other_data_are_refused(listed, message):
    name = "python_stdlib" if "tokens" in message else "fashion_mnist"
    data = {"name": name, "global_batch_size": 4, "transforms": [listed]}
    with pytest.raises(ConfigError, match=message):
        build(Config(data=data, model={"name": "gpt"}, train={"num_steps": 1}))


def job_of_images(folder, dtype, *listed):
    for part in ("train", "test"):
        np.savez(folder / part, image=np.ones((4, 28, 28, 1), dtype), label=np.arange(4))
    data = {"name": "npz", "dir": str(folder), "global_batch_size": 4, "transforms": [*listed]}
    return build(Config(data=data, model={"name": "mlp"}, train={"num_steps": 1}))


def test_whole_numbers_are_normalized_by_their_range_and_other_images_are_refused(tmp_path, caplog):
    batch = next(job_of_images(tmp_path, np.uint16, NORMALIZE).train_batches())
    np.testing.assert_allclose(batch.pop(TRANSFORM)(batch)["image"], 1 / 65535, rtol=1e-6)
    assert not caplog.messages
    for dtype in ("int32", "float32"):
        with pytest.raises(ConfigError, match=f"images of npz are {dtype} .*uint8 or uint16"):
            job_of_images(tmp_path, dtype, FLIP, NORMALIZE)
