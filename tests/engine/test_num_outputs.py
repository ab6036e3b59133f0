"""Classes and vocabularies: the model has as many outputs as the data have labels."""

import itertools
import json

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sweeps import swept

from jddp.config.files import load_config, read_yaml, with_overrides
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, DataError
from jddp.inspection.layers import num_outputs
from jddp.trainer.job.build import build, train
from jddp.trainer.runs.opened import open_run
from jddp.workbench.tokenize import BYTES, write_tokens


@pytest.fixture
def folders(tmp_path):
    """Images of five classes, eight of each."""
    assert jax.device_count() == 8  # JAX runs: a config can no longer change the devices there are.
    for part, name in itertools.product(("train", "test"), "abcde"):
        here = tmp_path / "images" / part / name
        here.mkdir(parents=True)
        for number in range(8):
            grey = np.full((8, 8, 3), 20 * number, np.uint8)
            Image.fromarray(grey).save(here / f"{number}.png")
    return tmp_path


def config(folder, *, data=None, **model):
    images = {"name": "image_folder", "dir": str(folder / "images"), "kwargs": {"image_size": 8}}
    return Config(
        train={"num_steps": 2},
        data={"global_batch_size": 8, **(data or images)},
        model={"name": "cnn", **model},
        mesh={"num_devices": 2},
        run={"dir": str(folder / "run")},
    )


def outputs_of(job):
    return num_outputs(job.ddp, job.batch_spec)


@pytest.mark.slow
def test_the_number_of_classes_is_filled_in_and_kept_with_the_run(folders):
    run = train(config(folders))
    assert read_yaml(run.run_dir / "config.yaml")["model"]["kwargs"] == {"num_classes": 5}
    assert open_run(run.run_dir).model(jnp.zeros((1, 8, 8, 3))).shape == (1, 5)
    assert train(config(folders)).step == 2  # the same config again: nothing to do
    # A default that is right is not written into a config.
    made, _ = load_config((), ["model.target=jddp.zoo.models:CNN", "mesh.num_devices=2"])
    assert build(made).config.model.kwargs == {}


@pytest.mark.parametrize("name", swept(["cnn", "cnn_nnx", "resnet18", "vit"], every=4))
def test_every_model_of_images_takes_the_number_of_classes(folders, name):
    more = {"cnn_nnx": {"image_size": 8, "num_channels": 3}}.get(name, {})
    assert outputs_of(build(config(folders, name=name, kwargs=more))) == 5


def test_fewer_outputs_than_classes_are_refused_and_more_are_said_once(folders, caplog):
    message = "^model: it has 3 outputs, and num_classes of the data is 5. "
    message += r"Set model.kwargs.num_classes=5\.$"
    with pytest.raises(ConfigError, match=message):
        build(config(folders, kwargs={"num_classes": 3}))
    build(config(folders, kwargs={"num_classes": 10}))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "jddp"]
    assert line.startswith("model: it has 10 outputs, and num_classes of the data is 5.")


def test_a_vocabulary_is_filled_in_and_a_smaller_model_is_refused(tmp_path, folders):
    texts = (f"document {i} " * 40 for i in range(20))
    write_tokens(texts, tmp_path / "t", tokenizer=BYTES, test_share=0.5)
    index = json.loads((tmp_path / "t" / "tokens.json").read_text())
    (tmp_path / "t" / "tokens.json").write_text(json.dumps({**index, "vocab_size": 512}))
    data = {"name": "tokens", "dir": str(tmp_path / "t"), "kwargs": {"sequence_length": 16}}
    gpt = {"num_layers": 1, "width": 8, "num_heads": 1}

    def job(**kwargs):
        made = config(folders, data=data, name="gpt", kwargs={**gpt, **kwargs})
        return build(with_overrides(made, {"loss.name": "next_token"}))

    assert outputs_of(job()) == 512
    with pytest.raises(ConfigError, match="it has 256 outputs, and vocab_size of the data is 512"):
        job(vocab_size=256)


def rows_in(folder, name, *, train, test, **more):
    """A config of rows with these labels, in the format of a source."""
    for part, labels in (("train", train), ("test", test)):
        rows = {"x": np.zeros((len(labels), 3), np.float32), "label": labels}
        rows |= {key: np.asarray(x) for key, (where, x) in more.items() if where == part}
        match name:
            case "npz":
                np.savez(folder / f"{part}.npz", **rows)
            case "hugging_face":
                datasets.Dataset.from_dict(rows).save_to_disk(str(folder / part))
    return config(folder, data={"name": name, "dir": str(folder)}, name="mlp")


LABELS, UNLABELLED = np.arange(16) % 3, np.where(np.arange(16) < 12, np.arange(16) % 3, -1)


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("name", ["npz", "hugging_face"])
def test_a_label_of_minus_one_is_refused_at_the_start_with_its_row(tmp_path, name, part):
    made = rows_in(tmp_path, name, **{"train": LABELS, "test": LABELS, part: UNLABELLED})
    with pytest.raises(DataError, match=f"{part}: 4 labels are negative"):
        build(made)


@pytest.mark.parametrize("name, dtype", [("npz", "uint8"), ("hugging_face", "int64")])
def test_labels_of_any_whole_numbers_and_files_are_counted(tmp_path, name, dtype):
    labels = LABELS.astype(dtype)
    made = rows_in(tmp_path, name, train=labels, test=labels + labels.dtype.type(8))
    with pytest.raises(ConfigError, match="10 outputs, and num_classes of the data is 11"):
        build(made)


def test_negative_labels_that_no_loss_of_jddp_counts_are_fine(tmp_path):
    mask = (np.arange(16) < 12).astype(np.float32)
    build(rows_in(tmp_path, "npz", train=LABELS, test=UNLABELLED, mask=("test", mask)))
    train = np.where(UNLABELLED < 0, 255, UNLABELLED)  # masked out, beyond all outputs
    build(rows_in(tmp_path, "npz", train=train, test=LABELS, mask=("train", mask)))
    made = rows_in(tmp_path, "npz", train=UNLABELLED, test=LABELS)
    with pytest.raises(DataError, match="train: 4 labels are negative"):
        build(made)
