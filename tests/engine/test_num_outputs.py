"""Outputs as many as labels or tokens; what runs of language models say."""

import itertools
import json
import shutil

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_files import file_of, write_images
from sweeps import swept
from tiny import make_batch, wrapped

import jddp
from jddp.config.files import load_config, read_yaml, with_overrides
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, DataError
from jddp.inspection.layers import num_outputs
from jddp.trainer.job.build import build, train
from jddp.trainer.runs.opened import open_run
from jddp.workbench.sampling import SampleText, continue_text
from jddp.workbench.tokenize import BYTES, write_tokens


@pytest.fixture
def folders(tmp_path):
    """Images of five classes, eight of each."""
    assert jax.device_count() == 8  # JAX runs: a config can no longer change the devices there are.
    names = itertools.product(("train", "test"), "abcde", range(8))
    files = {"{}/{}/{}.png".format(*x): np.full((8, 8, 3), 20 * x[2], np.uint8) for x in names}
    write_images(tmp_path / "images", {name: file_of(x) for name, x in files.items()})
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
        if name == "npz":
            np.savez(folder / f"{part}.npz", **rows)
        else:
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


LENGTH = 8
SIZES = {"num_layers": 1, "num_heads": 2, "width": 16, "max_length": LENGTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of tokens that are bytes."""
    folder = tmp_path_factory.mktemp("text")
    write_tokens(["abab" * 40 + str(i) for i in range(20)], folder / "tokens", tokenizer=BYTES)
    return folder


def config_of(folder, run_dir=None, **sections):
    """A small GPT on two devices."""
    data = {"name": "tokens", "dir": str(folder / "tokens"), "global_batch_size": 8}
    given = {
        "data": {**data, "kwargs": {"sequence_length": LENGTH}},
        "model": {"name": "gpt", "kwargs": SIZES},
        "loss": {"name": "next_token"},
        "optimizer": {"name": "adam", "learning_rate": 0.02},
        "mesh": {"num_devices": 2},
        "train": {"num_steps": 4},
        "run": {"dir": run_dir and str(run_dir)},
    }
    return Config(**given | sections)


def test_evaluations_have_perplexity_and_bits_per_byte_also_of_an_opened_run(folder, tmp_path):
    """A zero byte ends each document, and stands for no byte of it."""
    run = train(config_of(folder, tmp_path / "run"))
    index = json.loads((folder / "tokens" / "tokens.json").read_text())
    nats_per_byte = run.eval_metrics["loss"] * index["tokens"]["test"] / index["bytes"]["test"]
    assert run.eval_metrics["perplexity"] == pytest.approx(np.exp(run.eval_metrics["loss"]))
    assert run.eval_metrics["bits_per_byte"] == pytest.approx(nats_per_byte / np.log(2))
    opened = jddp.open_run(tmp_path / "run").evaluate()
    assert opened.keys() == run.eval_metrics.keys() - {"step", "split", "epoch"}
    assert opened["bits_per_byte"] == pytest.approx(run.eval_metrics["bits_per_byte"], rel=1e-6)


def test_a_run_opens_when_its_data_are_damaged(folder, tmp_path):
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    train(config_of(tmp_path, tmp_path / "run", train={"num_steps": 1}))
    (tmp_path / "tokens" / "tokens.json").write_text("{")
    run = jddp.open_run(tmp_path / "run")
    assert run.predict([{"tokens": np.zeros((2, LENGTH + 1), np.int32)}]).shape == (2, LENGTH, 256)
    with pytest.raises(DataError, match="not a whole index"):
        run.evaluate()


def test_a_sample_is_in_the_terminal_the_records_and_the_page_and_is_that_of_predict(
    folder, tmp_path, capsys
):
    sampled = {"name": "sample_text", "kwargs": {"prompt": "aba", "num_tokens": 5, "seed": 3}}
    evaluated = {"num_steps": 4, "eval_every_steps": 2}
    run = train(config_of(folder, tmp_path, train=evaluated, callbacks=[sampled]))
    texts = {x["step"]: x["sample"] for x in run.history if x["split"] == "callback"}
    assert texts.keys() == {2, 4}
    assert texts[4] == continue_text(jddp.open_run(tmp_path, mesh=1), "aba", num_tokens=5, seed=3)
    assert all(text.startswith("aba") for text in texts.values())
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith("sample 4  aba")]
    page = (tmp_path / "report.html").read_text()
    assert page.index("step 4</p><pre>aba") < page.index("step 2</p>")


def test_a_model_of_no_language_is_refused():
    for batches, message in (
        ([make_batch(8)], "sample_text continues tokens, and the evaluation has x, y. Leave"),
        (iter([make_batch(8)]), "evaluate= is an iterator, which can be read only once. Give"),
    ):
        options = {"evaluate": batches, "callbacks": [SampleText("a")]}
        with pytest.raises(ConfigError, match=message):
            jddp.fit(wrapped(), [make_batch(8)], num_steps=1, **options)
