"""A text is continued by the model of a run: token by token, each with its probability."""

import numpy as np
import optax
import pytest
from flax import linen as nn

import jddp
from jddp.__main__ import main
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, UsageError
from jddp.trainer.job.build import train
from jddp.workbench.sampling import continue_text, sample
from jddp.workbench.tokenize import BYTES, write_tokens
from jddp.zoo.losses import next_token
from jddp.zoo.models import GPT

LENGTH = 8
SIZES = {"num_layers": 1, "num_heads": 2, "width": 16, "max_length": LENGTH}


class Counts(nn.Module):
    """Scores of the next token that depend on the last alone: a table."""

    num_dims: int = 3

    @nn.compact
    def __call__(self, tokens, train=False):
        logits = nn.Embed(4, 4, embedding_init=nn.initializers.normal(1.0))(tokens)
        return logits if self.num_dims == 3 else logits.sum(-1)


def run_of(model, loss=next_token):
    ddp = jddp.DataParallel(model, optax.sgd(0.1), loss, mesh=1)
    return jddp.fit(ddp, [{"tokens": np.zeros((1, LENGTH + 1), np.int32)}], num_steps=1)


def trained_run(folder, num_steps=1, **job):
    job |= {"train": {"num_steps": num_steps}, "mesh": {"num_devices": 1}}
    train(Config(**job, run={"dir": str(folder)}))
    return folder


@pytest.fixture(scope="module")
def gpt():
    return run_of(GPT(vocab_size=16, **SIZES))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on bytes of text, in the folder of its run directory."""
    folder = tmp_path_factory.mktemp("text")
    write_tokens(["abab" * 40 + str(i) for i in range(20)], folder / "tokens", tokenizer=BYTES)
    data = {"name": "tokens", "dir": str(folder / "tokens"), "global_batch_size": 8}
    job = {
        "data": data | {"kwargs": {"sequence_length": LENGTH}},
        "model": {"name": "gpt", "kwargs": SIZES},
        "loss": {"name": "next_token"},
        "optimizer": {"name": "adam", "learning_rate": 0.02},
    }
    return trained_run(folder / "run", num_steps=120, **job)


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_the_model_on_the_whole_sequence(gpt):
    """Beyond the length of its sequences the model sees the last tokens alone."""
    found = sample(gpt, [3, 1], 12, length=LENGTH, temperature=0)
    assert found[:2] == [3, 1]
    for end in range(2, 14):
        window = np.array([found[max(0, end - LENGTH) : end]])
        assert found[end] == gpt.model(window)[0, -1].argmax()


def test_tokens_are_drawn_with_the_probabilities_of_the_model():
    run, count = run_of(Counts()), 1500
    found = np.array(sample(run, [0], count, length=1, temperature=2.0, seed=1))
    table = np.asarray(run.model(np.arange(4)[None])[0], np.float64) / 2.0
    want = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    for token in range(4):
        after = found[1:][found[:-1] == token]
        share = np.bincount(after, minlength=4) / len(after)
        # Five standard deviations: one of 16 shares is further in less than one seed of 100,000.
        assert (abs(share - want[token]) < 5 * np.sqrt(want[token] / len(after))).all()
    assert sample(run, [0], 20, length=1, seed=1) == sample(run, [0], 20, length=1, seed=1)
    assert sample(run, [0], 20, length=1, seed=1) != sample(run, [0], 20, length=1, seed=2)
    assert set(sample(run, [0], 50, length=1, vocab_size=2)) == {0, 1}


@pytest.mark.slow
def test_a_command_continues_a_text(trained, capsys):
    command = ["predict", str(trained), "--temperature", "0", "--num-tokens", "9", "--prompt"]
    assert main([*command, "aba"]) == 0
    assert capsys.readouterr().out == "aba" + "bababa" + "bab\n"
    opened, options = jddp.open_run(trained, mesh=1), {"num_tokens": 3, "seed": 1}
    hot = continue_text(opened, "b", temperature=100.0, **options)
    assert continue_text(opened, "b", **options) != hot


REFUSED = {
    "nothing to continue": ([], {"num_tokens": 1}, UsageError, "The prompt has 0 tokens"),
    "nothing to add": ([1], {"num_tokens": 0}, UsageError, "num_tokens is 0"),
    "NaN": ([1], {"num_tokens": 1, "temperature": np.nan}, UsageError, "temperature nan"),
    "vocabulary": ([1], {"num_tokens": 1, "vocab_size": 99}, ConfigError, "has 99 tokens"),
}


@pytest.mark.parametrize("tokens, given, error, reported", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_continued_is_refused(gpt, tokens, given, error, reported):
    with pytest.raises(error, match=reported):
        sample(gpt, tokens, length=LENGTH, **given)


@pytest.mark.slow
def test_models_and_runs_of_no_text_are_refused(trained, tmp_path, capsys):
    flat = run_of(Counts(num_dims=2), lambda model, batch: model(batch["tokens"]).sum(-1))
    with pytest.raises(ConfigError, match=r"logits of shape \(1, 8\), not \(b, t, vocab\)"):
        sample(flat, [0], 1, length=LENGTH)
    for arguments, reported in (
        ("--prompt a --out b.csv", "--prompt prints a text"),
        ("--data a.npz", "--data needs --out"),
        (f"--prompt a --tokenizer {tmp_path}/no.json", "not a Hugging Face tokenizer file"),
    ):
        assert main(["predict", str(trained), *arguments.split()]) == 2
        assert reported in capsys.readouterr().err
    (trained.parent / "tokens" / "tokens.json").unlink()  # of what tokenizer, nobody knows then
    with pytest.raises(ConfigError, match="are not bytes. Give --tokenizer FILE"):
        continue_text(jddp.open_run(trained), "a")
    for part in ("train", "test"):
        np.savez(tmp_path / part, image=np.ones((4, 2, 2, 1), np.float32), label=np.arange(4))
    data = {"name": "npz", "dir": str(tmp_path), "global_batch_size": 2}
    trained_run(tmp_path / "run", data=data, model={"name": "mlp"})
    with pytest.raises(UsageError, match="was not trained on tokens that jddp can read"):
        continue_text(jddp.open_run(tmp_path / "run"), "a")
