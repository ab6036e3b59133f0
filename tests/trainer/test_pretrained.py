"""A job continues the training of published weights, which a config names."""

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy

from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.trainer.job.build import train
from jddp.workbench.state_dicts import to_state_dict
from jddp.zoo.models import GPT

SIZES = {"vocab_size": 16, "num_layers": 2, "num_heads": 2, "width": 16, "max_length": 8}


def config(**changes):
    sections = {
        "train": {"num_steps": 8, "log_every_steps": 1},
        "run": {"dir": "run"},
        "data": {"name": "tokens", "dir": "tokens", "global_batch_size": 8},
        "model": {"name": "gpt", "kwargs": SIZES, "init_from": "gpt2.safetensors"},
        "loss": {"name": "next_token"},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "mesh": {"num_devices": 2},
    }
    sections["data"]["kwargs"] = {"sequence_length": 8}
    sections["model"] |= changes
    return Config(**sections)


@pytest.fixture
def loss_of_weights(tmp_path, monkeypatch):
    """Writes tokens, all of whose windows are equal, and a GPT-2; returns its loss on a window."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()
    for name in ("train", "test"):
        np.save(tmp_path / "tokens" / f"{name}.npy", np.arange(640, dtype=np.uint16) % 8)
    model, window = GPT(**SIZES), np.arange(9)[None] % 8
    variables = jax.jit(model.init)(jax.random.key(7), window[:, :-1])
    variables = jax.tree.map(lambda x: 5 * np.asarray(x), variables)  # unlike any first values
    save(to_state_dict(model, variables, "huggingface"))
    logits = jax.jit(model.apply)(variables, window[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()


def save(tensors):
    safetensors.numpy.save_file(tensors, "gpt2.safetensors")


def test_weights_of_gpt_2_continue_training(loss_of_weights, capsys):
    losses = [record["loss"] for record in train(config()).history]
    np.testing.assert_allclose(losses[0], loss_of_weights, rtol=1e-5)
    assert losses[-1] < losses[0] / 2
    text = (
        "started from gpt2.safetensors, by the names of huggingface: 28 of 28 arrays were loaded."
    )
    assert text in capsys.readouterr().err


def test_a_state_dict_with_other_keys_is_one_line_by_the_keys_of_a_config(loss_of_weights):
    tensors = safetensors.numpy.load_file("gpt2.safetensors")
    del tensors["transformer.ln_f.bias"]
    save(tensors)
    message = (
        r"^model\.init_from: gpt2\.safetensors does not fit the model at transformer.ln_f.bias "
        r"\(missing\), by the names of huggingface\. With model\.weights_partial=true .*\.$"
    )
    with pytest.raises(ConfigError, match=message):
        train(config())
    assert train(config(weights_partial=True)).step == 8
