"""`jddp report --examples` runs the model on its test data, and draws what it does with them."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

import jddp
from jddp.config.schema import Config
from jddp.ground.errors import ExitCode
from jddp.trainer.job.build import train
from jddp.workbench import examples
from jddp.workbench.examples import examples_of
from jddp.workbench.pages import picture
from jddp.workbench.report import main

CLASSES = 3


def images(num, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, num)
    pixels = rng.normal(labels[:, None, None, None], 1.5, (num, 4, 4, 1))
    return {"image": pixels.astype(np.float32), "label": labels.astype(np.int32)}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name, num in (("train", 64), ("test", 50)):
        np.savez(folder / f"{name}.npz", **images(num, seed=num))
    config = Config(
        data={"name": "npz", "dir": str(folder), "global_batch_size": 16},
        model={"name": "mlp", "kwargs": {"widths": [4], "num_outputs": CLASSES}},
        train={"num_steps": 20},
        mesh={"num_devices": 1},
        run={"dir": str(folder / "run")},
    )
    train(config)
    return folder / "run"


def test_mistakes_and_the_confusion_matrix_are_those_of_the_model(classifier, monkeypatch):
    monkeypatch.setattr(examples, "MOST_MISTAKES", 5)
    run = jddp.open_run(classifier, mesh=1)
    found = examples_of(run)
    data = images(50, seed=50)
    logits = run.predict()
    predicted, confusion = logits.argmax(-1), np.zeros((CLASSES, CLASSES))
    np.add.at(confusion, (data["label"], predicted), 1)
    assert found.num_examples == 50
    np.testing.assert_array_equal(found.confusion, confusion)
    sure = np.exp(logits).max(-1) / np.exp(logits).sum(-1)
    wrong = np.flatnonzero(predicted != data["label"])
    worst = wrong[np.argsort(-sure[wrong])][:5]
    assert [x.probability for x in found.mistakes] == pytest.approx(sure[worst].tolist())
    for mistake, i in zip(found.mistakes, worst, strict=True):
        np.testing.assert_array_equal(mistake.pixels, data["image"][i])
        assert (mistake.label, mistake.predicted) == (data["label"][i], predicted[i])


def test_the_page_has_the_mistakes_as_images(classifier, capsys):
    assert main([str(classifier), "--examples"]) == ExitCode.DONE
    page = (classifier / "report.html").read_text()
    assert "50 test examples, by the checkpoint of step 20." in page
    assert "Most confident mistakes" in page
    encoded = re.search(r'src="data:image/png;base64,([^"]*)"', page)[1]
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (4, 4)


def run_on(folder, data, model, loss):
    """The opened run of a small job on a folder."""
    config = Config(
        data={"dir": str(folder), "global_batch_size": 16, **data},
        model=model,
        loss={"name": loss},
        train={"num_steps": 3},
        mesh={"num_devices": 1},
        run={"dir": str(folder / "run")},
    )
    train(config)
    return jddp.open_run(folder / "run", mesh=1)


def test_masked_rows_count_in_nothing_and_images_of_other_channels_are_not_drawn(tmp_path):
    arrays = images(48, seed=1)
    arrays["image"] = np.repeat(arrays["image"], 4, axis=3)
    mask = np.arange(48) % 3 > 0
    np.savez(tmp_path / "train.npz", **arrays)
    np.savez(tmp_path / "test.npz", **arrays, mask=mask.astype(np.float32))
    model = {"name": "mlp", "kwargs": {"widths": [4], "num_outputs": CLASSES}}
    run = run_on(tmp_path, {"name": "npz"}, model, "cross_entropy")
    found = examples_of(run)
    assert np.sum(found.confusion, axis=1).tolist() == np.bincount(arrays["label"][mask]).tolist()
    assert found.mistakes == []


def test_of_another_loss_no_examples_are_drawn(classifier, capsys):
    config = classifier / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("name: cross_entropy", "name: mean_squared_error"))
    assert main([str(classifier), "--examples"]) == ExitCode.USAGE
    config.write_text(text)
    assert "has the loss 'mean_squared_error'" in capsys.readouterr().err


@pytest.mark.parametrize("shape, mode", [((200, 100), "L"), ((5, 6, 1), "L"), ((5, 6, 3), "RGB")])
def test_an_array_becomes_a_png_with_its_range_as_black_to_white(shape, mode):
    pixels = np.random.default_rng(0).normal(size=shape)
    encoded = re.search('base64,([^"]*)', picture(pixels, 'a "name"'))[1]
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert image.mode == mode
    shown, every = np.asarray(image), 3 if shape[0] > 96 else 1
    wanted = pixels[::every, ::every].squeeze()
    wanted = (wanted - wanted.min()) / np.ptp(wanted) * 255
    np.testing.assert_allclose(shown, wanted, atol=1.01)
