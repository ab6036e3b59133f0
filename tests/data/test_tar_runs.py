"""Tar files of samples: trained from a config, resumed, and their samples named."""

import numpy as np
import pytest
from data_files import file_of, write_images, write_tar
from states import assert_same

from jddp.config.schema import Config
from jddp.trainer.job.build import train
from jddp.trainer.runs.predictions import predict_file

pytestmark = pytest.mark.usefixtures("started_devices")


@pytest.fixture
def tars(tmp_path):
    """Two shards of images of three classes."""
    rng = np.random.default_rng(0)
    for part in ("train-0", "train-1", "test-0"):
        samples = {}
        for number in range(12):
            samples[f"{part}-{number:02}.png"] = file_of(rng.integers(0, 256, (8, 8, 3), "u1"))
            samples[f"{part}-{number:02}.cls"] = b"%d" % (number % 3)
        write_tar(tmp_path / f"{part}.tar", samples)
    return tmp_path


def config(tars, name, num_steps, **kwargs):
    kwargs = {"image_size": 8, **kwargs}
    return Config(
        data={"name": "webdataset", "dir": str(tars), "global_batch_size": 8, "kwargs": kwargs},
        model={"name": "mlp", "kwargs": {"num_outputs": 3}},
        train={"num_steps": num_steps},
        mesh={"num_devices": 2},
        optimizer={"schedule": {"name": "constant_schedule"}},
        run={"dir": str(tars / name)},
    )


@pytest.mark.slow
def test_a_run_of_tar_files_resumes_bitwise_and_predicts_images(tars):
    whole = train(config(tars, "whole", 5))
    train(config(tars, "parts", 2))
    resumed = train(config(tars, "parts", 5))
    assert_same(resumed.state, whole.state)
    assert whole.evaluate() == resumed.evaluate()
    images = {f"{number}.png": file_of(np.full((9, 9, 3), number, "u1")) for number in range(3)}
    write_images(tars / "new", images)
    assert predict_file(whole.run_dir, tars / "new", tars / "out.csv") == 3
