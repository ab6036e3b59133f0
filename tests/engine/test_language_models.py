"""Runs of language models: what their evaluations and records say."""

import json

import numpy as np
import optax
import pytest
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.trainer.job.build import train
from jddp.workbench.sampling import SampleText, continue_text
from jddp.workbench.tokenize import BYTES, write_tokens

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
    kwargs = {"sequence_length": LENGTH}
    data = {"name": "tokens", "dir": str(folder / "tokens"), "global_batch_size": 8}
    given = {
        "data": {**data, "kwargs": kwargs},
        "model": {"name": "gpt", "kwargs": SIZES},
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
    assert opened.keys() == run.eval_metrics.keys() - {"step", "split", "epoch"}
    assert opened["bits_per_byte"] == pytest.approx(run.eval_metrics["bits_per_byte"], rel=1e-6)


def test_tokens_per_second_are_those_that_are_predicted_and_not_masked(folder):
    kwargs = {"sequence_length": LENGTH, "documents": "pack"}
    data = {"name": "tokens", "dir": str(folder / "tokens"), "global_batch_size": 24}
    every_step = {"num_steps": 6, "log_every_steps": 1}
    run = train(config_of(folder, data={**data, "kwargs": kwargs}, train=every_step))
    timed = [x for x in run.history if "tokens_per_second" in x]
    assert min(x["count"] for x in timed) < 24 * LENGTH
    for record in timed:
        tokens = record["tokens_per_second"] * record["step_seconds"]
        assert tokens == pytest.approx(record["count"])


def sampled(*prompts, **kwargs):
    """The section of a config that samples."""
    prompt = prompts[0] if len(prompts) == 1 else list(prompts)
    return [{"name": "sample_text", "kwargs": {"prompt": prompt, "num_tokens": 5, **kwargs}}]


EVALUATED = {"num_steps": 4, "eval_every_steps": 2}


def test_a_sample_is_in_the_terminal_the_records_and_the_page_and_is_that_of_predict(
    folder, tmp_path, capsys
):
    config = config_of(folder, tmp_path, train=EVALUATED, callbacks=sampled("aba", seed=3))
    run = train(config)
    texts = {x["step"]: x["sample"] for x in run.history if x["split"] == "callback"}
    assert texts.keys() == {2, 4}
    assert texts[4] == continue_text(jddp.open_run(tmp_path, mesh=1), "aba", num_tokens=5, seed=3)
    assert all(text.startswith("aba") for text in texts.values())
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith("sample 4  aba")]
    page = (tmp_path / "report.html").read_text()
    assert page.index("step 4</p><pre>aba") < page.index("step 2</p>")


@pytest.mark.parametrize(
    "batches, message",
    [
        ([make_batch(8)], "sample_text continues tokens, and the evaluation has x, y. Leave"),
        (iter([make_batch(8)]), "evaluate= is an iterator, which can be read only once. Give"),
    ],
)
def test_a_model_of_no_language_is_refused(batches, message):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2)
    options = {"evaluate": batches, "callbacks": [SampleText("a")]}
    with pytest.raises(ConfigError, match=message):
        jddp.fit(ddp, [make_batch(8)], num_steps=1, **options)
