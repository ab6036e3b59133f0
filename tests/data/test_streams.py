"""Streams in a config: batches of your own, which have no numbered examples."""

import sys

import datasets
import numpy as np
import pytest
from runs import at
from states import equal

import jddp
from jddp.__main__ import main
from jddp.config.files import load_config
from jddp.ground.errors import ConfigError, DataError
from jddp.trainer.job.build import build

pytestmark = pytest.mark.usefixtures("started_devices")

MINE = """
import itertools
import grain
import numpy as np

SEEN = []

def rows(size, number):
    image = np.random.default_rng(number).random((size, 4), np.float32)
    return {"image": image, "label": image.argmax(1).astype(np.int32)}

def plain(global_batch_size, seed, process_index, num_processes, first=0):
    SEEN.append((global_batch_size, seed, process_index, num_processes))
    train = (rows(global_batch_size, seed + i) for i in itertools.count(first))
    return train, lambda: iter([rows(global_batch_size, 10**6), rows(3, 10**6 + 1)])

def of_grain(size):
    return grain.MapDataset.range(100).map(lambda i: rows(size, i)).to_iter_dataset()

def positioned(global_batch_size):
    return of_grain(global_batch_size), [rows(global_batch_size, 10**6)]

def pixels(size, number):
    image = np.random.default_rng(number).integers(0, 256, (size, 2, 2, 1), np.uint8)
    return {"image": image, "label": image.reshape(size, 4).argmax(1).astype(np.int32)}

def images(global_batch_size):
    train = (pixels(global_batch_size, i) for i in itertools.count())
    return train, [pixels(global_batch_size, 10**6)]

TEST = [rows(8, 0)]
fixed = lambda: (of_grain(8), TEST)
short = lambda global_batch_size: (iter([rows(global_batch_size, 0)]), TEST)
empty = lambda: (iter([]), [])
single = lambda: (iter([{"image": np.float32(1.0), "label": 1}]), TEST)
once = lambda global_batch_size: (of_grain(global_batch_size), iter(TEST))
"""

DATA = ["data.name=null", "data.global_batch_size=16", "model.kwargs.num_outputs=4"]
TRAIN = ["model.name=mlp", "train.num_steps=4", "checkpoint.every_steps=1", "mesh.num_devices=2"]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """A module with functions that return streams, in the current directory."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    import mine

    yield mine
    sys.modules.pop("mine", None)


def job_of(name, *keys, run="run"):
    own = [*DATA, *TRAIN, f"data.target=mine:{name}", f"run.dir={run}", *keys]
    return build(load_config([], own)[0])


def end(run):
    raise InterruptedError  # as a crash does


def test_a_stream_of_a_config_trains_as_the_same_batches_of_fit_do(mine, capsys):
    job = job_of("plain", "seed=5")
    assert mine.SEEN == [(16, 5, 0, 1)]
    run = job.run()
    train, test = mine.plain(16, 5, 0, 1)
    again = jddp.fit(job.ddp, train, num_steps=4, evaluate=test(), seed=5)
    equal(run.state.params, again.state.params)
    assert run.eval_metrics == again.eval_metrics
    assert run.eval_metrics["examples"] == 19
    assert main(["evaluate", "run", "--trust", "config"]) == 0
    assert f"{run.eval_metrics['accuracy']:.4f}"[:5] in capsys.readouterr().out


def test_images_of_a_stream_are_normalized_by_the_config(mine):
    normalize = "data.transforms=[{name: normalize, kwargs: {mean: 0.25, std: 0.5}}]"
    job = job_of("images", normalize)
    run = job.run()

    def scaled(batches):
        for batch in batches:
            yield {**batch, "image": (batch["image"].astype(np.float32) / 255 - 0.25) / 0.5}

    train, test = mine.images(16)
    again = jddp.fit(job.ddp, scaled(train), num_steps=4, evaluate=[*scaled(test)])
    # Adam makes more of the roundings of single parameters.
    assert run.metrics["loss"] == pytest.approx(again.metrics["loss"], rel=1e-5)
    assert run.eval_metrics["loss"] == pytest.approx(again.eval_metrics["loss"], rel=1e-5)
    opened = jddp.open_run("run", trust="config")
    assert opened.evaluate()["loss"] == pytest.approx(run.eval_metrics["loss"], rel=1e-6)


def test_transforms_that_a_stream_cannot_have_are_refused():
    with pytest.raises(ConfigError, match=r"transforms\[0\] needs random numbers of each example"):
        job_of("images", "data.transforms=[{name: flip_and_shift}]")
    with pytest.raises(ConfigError, match="images of the stream are float32 numbers"):
        job_of("plain", "data.transforms=[{name: normalize}]")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "positioned"])
def test_a_killed_job_of_a_stream_resumes_bitwise(mine, caplog, name):
    whole = job_of(name, run="whole").run()
    with pytest.raises(InterruptedError):
        job_of(name).run([at(2, end)])
    resumed = job_of(name).run()
    assert resumed.step == 4
    equal(whole.state.params, resumed.state.params)
    assert ("replaying 2 batches" in caplog.text) == (name == "plain")


@pytest.mark.slow
def test_a_killed_job_of_a_hugging_face_stream_resumes_bitwise(tmp_path):
    for part, num_rows in (("train", 40), ("test", 9)):
        image = np.random.default_rng(num_rows).random((num_rows, 4), np.float32)
        rows = {"image": image, "label": image.argmax(1)}
        datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "rows" / f"{part}.parquet"))

    def job(run, *keys):
        keys = ["data.kwargs.path=rows", "data.kwargs.streaming=true", f"run.dir={run}", *keys]
        return build(load_config([], [*DATA[1:], *TRAIN, "data.name=hugging_face", *keys])[0])

    whole = job("whole").run()
    with pytest.raises(InterruptedError):
        job("run").run([at(3, end)])  # in the second epoch
    resumed = job("run").run()
    equal(whole.state.params, resumed.state.params)
    assert resumed.eval_metrics == whole.eval_metrics
    assert resumed.eval_metrics["examples"] == 9
    on_four = job("four", "mesh.num_devices=4").run()
    assert on_four.eval_metrics == pytest.approx(whole.eval_metrics, rel=1e-5)


def test_a_dry_run_reads_the_first_batch_of_a_stream_alone(capsys):
    keys = [*DATA, *TRAIN, "data.target=mine:positioned", "run.dir=run"]
    assert main(["train", *keys, "--dry-run"]) == 0
    assert "data     stream of mine:positioned" in capsys.readouterr().out


def test_keys_that_need_numbered_examples_are_refused_in_one_line_each():
    keys = ["data.num_workers=2", "train.eval_every_epochs=1"]
    with pytest.raises(ConfigError) as raised:
        job_of("plain", *keys, "train.num_steps=null", "train.num_epochs=1")
    names = [line.partition("=")[0] for line in str(raised.value).splitlines()]
    assert names == ["train.num_epochs", "train.eval_every_epochs", "data.num_workers"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("fixed", ConfigError, "has 8 rows. Set data.global_batch_size=8, or let"),
        ("empty", DataError, "ended after 0 batches"),
        ("short", DataError, "ended after 1 batches"),
        ("single", DataError, "returns single examples"),
        ("once", ConfigError, "mine:once returns list_iterator. It must return batches that can"),
    ],
)
def test_a_function_that_returns_no_usable_stream_is_one_clear_line(name, error, message):
    with pytest.raises(error, match=message):
        job_of(name).run()
