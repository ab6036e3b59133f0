"""A run's weights leave as a folder of the Hub or as a state dict, and come back."""

import json

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from states import equal

import jddp
from jddp.checkpoint.weights import read_weights
from jddp.commands.runs import checkpoint_command as main
from jddp.config.schema import Config
from jddp.trainer.job.build import train
from jddp.workbench.state_dicts import from_state_dict
from jddp.zoo.models import GPT

SIZES = {"vocab_size": 16, "num_layers": 1, "num_heads": 2, "width": 8, "max_length": 8}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of a GPT whose evaluated parameters are a moving average."""
    folder = tmp_path_factory.mktemp("gpt")
    for name in ("train", "test"):
        np.save(folder / f"{name}.npy", np.arange(200, dtype=np.uint16) % 16)
    data = {"name": "tokens", "dir": str(folder), "global_batch_size": 8}
    config = Config(
        train={"num_steps": 2, "eval_params": "ema"},
        run={"dir": str(folder / "run")},
        data=data | {"kwargs": {"sequence_length": 8}},
        model={"name": "gpt", "kwargs": SIZES},
        loss={"name": "next_token"},
        optimizer={"name": "sgd", "learning_rate": 0.5},
        ddp={"ema_decay": 0.5},
        mesh={"num_devices": 2},
    )
    train(config)
    return folder / "run"


@pytest.mark.slow
def test_a_run_leaves_as_state_dict_and_as_folder_that_transformers_read(run_dir, tmp_path, capsys):
    folder, file = tmp_path / "gpt2", tmp_path / "gpt2.safetensors"
    for target in (folder, file):
        assert main(["export", str(run_dir), str(target), "--names", "huggingface"]) == 0
        assert f"step 2 is in {target}, " in capsys.readouterr().out
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tokens = np.arange(8)[None]
    got = jax.jit(GPT(**SIZES).apply)(from_state_dict(GPT(**SIZES), tensors), tokens)
    np.testing.assert_allclose(got, jddp.open_run(run_dir, params="ema").model(tokens), rtol=1e-5)
    with safetensors.safe_open(file, "numpy") as opened:
        assert opened.metadata()["format"] == "pt"
        assert {*opened.keys()} == tensors.keys()
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["n_embd"], config["n_layer"]) == ("gpt2", 8, 1)
    assert {x.name for x in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_a_folder_without_names_has_the_arrays_and_the_model_of_the_run(run_dir, tmp_path):
    assert main(["export", str(run_dir), str(tmp_path / "hub")]) == 0
    config = json.loads((tmp_path / "hub/config.json").read_text())
    assert config["model"] == {"name": "gpt", "target": None, "kwargs": SIZES}
    equal(read_weights(tmp_path / "hub")["params"], read_weights(run_dir)["params"])


MISTAKES = [
    ("export RUN x --names torchvision", 2, "'torchvision'"),
    ("export RUN there", 74, "there"),
    ("export RUN x --step 7", 74, "step 7"),
]


@pytest.mark.parametrize("arguments, code, message", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    run_dir, tmp_path, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(arguments.replace("RUN", str(run_dir)).split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]
