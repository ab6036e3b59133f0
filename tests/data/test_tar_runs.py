"""Tar files of samples: trained from a config, resumed, and their samples named."""

import io
import tarfile

import datasets
import numpy as np
import pytest
from PIL import Image
from states import assert_same

from jddp.config.schema import Config
from jddp.trainer.job.build import train
from jddp.trainer.runs.predictions import predict_file, rows_of_step

pytestmark = pytest.mark.usefixtures("started_devices")


def add(tar, name, content):
    header = tarfile.TarInfo(name)
    header.size = len(content)
    tar.addfile(header, io.BytesIO(content))


@pytest.fixture
def tars(tmp_path, monkeypatch):
    """Two shards of images of three classes."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rng = np.random.default_rng(0)
    for part in ("train-0", "train-1", "test-0"):
        with tarfile.open(tmp_path / f"{part}.tar", "w") as tar:
            for number in range(12):
                pixels = rng.integers(0, 256, (8, 8, 3), "u1")
                Image.fromarray(pixels).save(image := io.BytesIO(), "PNG")
                add(tar, f"{part}-{number:02}.png", image.getvalue())
                add(tar, f"{part}-{number:02}.cls", b"%d" % (number % 3))
    return tmp_path


def config(tars, name, num_steps, **kwargs):
    return Config(
        data={
            "name": "webdataset",
            "dir": str(tars),
            "kwargs": {"image_size": 8, **kwargs},
            "global_batch_size": 8,
        },
        model={"name": "mlp", "kwargs": {"num_outputs": 3}},
        train={"num_steps": num_steps},
        mesh={"num_devices": 2},
        optimizer={"schedule": {"name": "constant_schedule"}},
        run={"dir": str(tars / name)},
    )


@pytest.mark.slow
def test_a_run_of_tar_files_resumes_bitwise_names_its_samples_and_predicts_images(tars):
    whole = train(config(tars, "whole", 5))
    train(config(tars, "parts", 2))
    resumed = train(config(tars, "parts", 5))
    assert_same(resumed.state, whole.state)
    assert whole.evaluate() == resumed.evaluate()
    epoch = [name for step in (1, 2, 3) for name in rows_of_step(whole.run_dir, step).names]
    assert len({*epoch}) == 24
    assert "train-1.tar: train-1-11" in epoch
    (tars / "new").mkdir()
    for number in range(3):
        Image.fromarray(np.full((9, 9, 3), number, "u1")).save(tars / "new" / f"{number}.png")
    assert predict_file(whole.run_dir, tars / "new", tars / "out.csv") == 3


def test_images_that_do_not_decode_are_counted_at_the_end(tars, capsys):
    damaged = bytearray((tars / "train-0.tar").read_bytes())
    for number in (3, 7):
        at = damaged.index(f"train-0-{number:02}.png".encode())
        damaged[at + 512] ^= 255
    (tars / "train-0.tar").write_bytes(damaged)
    train(config(tars, "run", 3, undecodable="mask"))
    said = capsys.readouterr().out
    assert "masked out: 2 of the examples read by this process" in said
