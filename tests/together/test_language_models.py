"""Runs of language models: what their evaluations and records say."""

import json
import shutil

import numpy as np
import pytest

import jddp
from jddp.config.schema import Config
from jddp.data.sources.tokenize import BYTES, write_tokens
from jddp.errors import DataError
from jddp.job.job import train

LENGTH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of tokens that are bytes."""
    folder = tmp_path_factory.mktemp("text")
    write_tokens(["abab" * 40 + str(i) for i in range(20)], folder / "tokens", tokenizer=BYTES)
    return folder


def config_of(folder, run_dir=None, **sections):
    """A small GPT on two devices."""
    kwargs = {"sequence_length": LENGTH}
    data = {"name": "tokens", "dir": str(folder / "tokens"), "global_batch_size": 8}
    sizes = {"num_layers": 1, "num_heads": 2, "width": 16, "max_length": LENGTH}
    given = {
        "data": {**data, "kwargs": kwargs},
        "model": {"name": "gpt", "kwargs": sizes},
        "loss": {"name": "next_token"},
        "optimizer": {"name": "adam", "learning_rate": 0.02},
        "mesh": {"num_devices": 2},
        "train": {"num_steps": 4},
        "run": {"dir": run_dir and str(run_dir)},
    }
    return Config(**{**given, **sections})


def test_evaluations_have_perplexity_and_bits_per_byte_also_of_a_run_that_is_opened(
    folder, tmp_path
):
    """A zero byte ends each document, and stands for no byte of it."""
    run = train(config_of(folder, tmp_path / "run"))
    index = json.loads((folder / "tokens" / "tokens.json").read_text())
    nats_per_byte = run.eval_metrics["loss"] * index["tokens"]["test"] / index["bytes"]["test"]
    assert run.eval_metrics["perplexity"] == pytest.approx(np.exp(run.eval_metrics["loss"]))
    assert run.eval_metrics["bits_per_byte"] == pytest.approx(nats_per_byte / np.log(2))
    opened = jddp.open_run(tmp_path / "run").evaluate()
    assert opened.keys() == run.eval_metrics.keys() - {"step", "split"}
    assert opened["bits_per_byte"] == pytest.approx(run.eval_metrics["bits_per_byte"], rel=1e-6)


def test_tokens_per_second_are_those_that_are_predicted_and_not_masked(folder):
    kwargs = {"sequence_length": LENGTH, "cross_documents": False}
    data = {"name": "tokens", "dir": str(folder / "tokens"), "global_batch_size": 24}
    every_step = {"num_steps": 6, "log_every_steps": 1}
    run = train(config_of(folder, data={**data, "kwargs": kwargs}, train=every_step))
    timed = [x for x in run.history if "tokens_per_second" in x]
    assert min(x["count"] for x in timed) < 24 * LENGTH
    for record in timed:
        tokens = record["tokens_per_second"] * record["step_seconds"]
        assert tokens == pytest.approx(record["count"])


def test_a_run_opens_when_its_data_are_damaged(folder, tmp_path):
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    train(config_of(tmp_path, tmp_path / "run", train={"num_steps": 1}))
    (tmp_path / "tokens" / "tokens.json").write_text("{")
    run = jddp.open_run(tmp_path / "run")
    assert run.predict([{"tokens": np.zeros((2, LENGTH + 1), np.int32)}]).shape == (2, LENGTH, 256)
    with pytest.raises(DataError, match=r"tokens\.json: not a whole index"):
        run.evaluate()
