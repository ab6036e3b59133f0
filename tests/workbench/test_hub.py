"""A run's weights leave as a folder of the Hub or as a state dict, are uploaded, and come back."""

import inspect
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from states import equal

import jddp
from jddp.checkpoint.weights import read_weights
from jddp.commands.checkpoint import main
from jddp.config.schema import Config
from jddp.trainer.job.build import train
from jddp.workbench.state_dicts import from_state_dict
from jddp.zoo.models import GPT

huggingface_hub = pytest.importorskip("huggingface_hub")

SIZES = {"vocab_size": 16, "num_layers": 1, "num_heads": 2, "width": 8, "max_length": 8}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of a GPT whose evaluated parameters are a moving average."""
    folder = tmp_path_factory.mktemp("gpt")
    for name in ("train", "test"):
        np.save(folder / f"{name}.npy", np.arange(200, dtype=np.uint16) % 16)
    data = {"name": "tokens", "dir": str(folder), "global_batch_size": 8}
    train(
        Config(
            train={"num_steps": 2, "eval_params": "ema"},
            run={"dir": str(folder / "run")},
            data=data | {"kwargs": {"sequence_length": 8}},
            model={"name": "gpt", "kwargs": SIZES},
            loss={"name": "next_token"},
            optimizer={"name": "sgd", "learning_rate": 0.5},
            ddp={"ema_decay": 0.5},
            mesh={"num_devices": 2},
        )
    )
    return folder / "run"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that stands for the Hub; its functions take what huggingface_hub's take."""
    there = tmp_path / "hub"

    def create_repo(repo_id, *, private, exist_ok):
        assert private
        (there / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def file_exists(repo_id, filename):
        return (there / repo_id / filename).exists()

    def upload_folder(*, repo_id, folder_path, commit_message, ignore_patterns):
        ignored = shutil.ignore_patterns(*ignore_patterns or ())
        shutil.copytree(folder_path, there / repo_id, ignore=ignored, dirs_exist_ok=True)
        return Commit()

    def snapshot_download(repo_id, *, revision, local_dir, allow_patterns):
        if not (there / repo_id).is_dir():
            raise FileNotFoundError(f"404 Client Error.\n\nRepository Not Found: {repo_id}")
        for path in {x for pattern in allow_patterns for x in (there / repo_id).glob(pattern)}:
            shutil.copyfile(path, local_dir / path.name)

    for own in (create_repo, file_exists, upload_folder, snapshot_download):
        theirs = inspect.signature(getattr(huggingface_hub, own.__name__)).parameters
        assert inspect.signature(own).parameters.keys() <= theirs.keys()
        monkeypatch.setattr(huggingface_hub, own.__name__, own)
    return there


class Commit:
    commit_url = "https://hub/commit"


@pytest.mark.slow
def test_a_run_leaves_as_a_state_dict_and_as_a_folder_that_transformers_read(
    run_dir, tmp_path, capsys
):
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
    assert sorted(x.name for x in folder.iterdir()) == [
        *("README.md", "config.json", "model.safetensors")
    ]


def test_what_is_pushed_is_pulled_and_a_card_of_the_repository_stays(
    run_dir, hub, tmp_path, capsys
):
    (hub / "me/gpt").mkdir(parents=True)
    (hub / "me/gpt/README.md").write_text("mine")
    assert main(["push", str(run_dir), "me/gpt"]) == 0
    assert "step 2 is in https://hub/commit" in capsys.readouterr().out
    assert main(["pull", "me/gpt", str(tmp_path / "pulled")]) == 0
    assert (tmp_path / "pulled/README.md").read_text() == "mine"
    config = json.loads((tmp_path / "pulled/config.json").read_text())
    assert config["model"] == {"name": "gpt", "target": None, "kwargs": SIZES}
    want = read_weights(run_dir)["params"]
    equal(read_weights(tmp_path / "pulled")["params"], want)
    assert main(["push", str(run_dir), "me/new", "--names", "huggingface"]) == 0
    assert "library_name: transformers" in (hub / "me/new/README.md").read_text()


MISTAKES = [
    ("export RUN x --names torchvision", 2, "'torchvision' has no names for a GPT. There are"),
    ("export RUN x --all", 2, "--all exports into a file"),
    ("export RUN there", 74, "there cannot be written: File exists"),
    ("push RUN me/gpt --names timm", 2, "'timm' has no names for a GPT"),
    ("push RUN me/gpt --step 7", 74, "cannot be read as step 7"),
    ("pull me/none new", 74, "me/none: 404 Client Error."),
    ("pull me/part new", 65, "is one of several files, and model.safetensors.index.json"),
    ("pull me/card new", 65, "me/card holds no model.safetensors"),
    ("pull me/card there", 74, "there is not empty"),
]


@pytest.mark.parametrize("arguments, code, message", MISTAKES)
def test_a_mistake_is_one_line_and_loses_nothing(
    run_dir, hub, tmp_path, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    for name in ("me/card/README.md", "me/part/model-00001-of-00002.safetensors"):
        (hub / name).parent.mkdir(parents=True)
        (hub / name).write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments.replace("RUN", str(run_dir)).split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert [x for x in sorted(tmp_path.rglob("*")) if "new" not in x.parts] == before


def test_without_huggingface_hub_the_extra_is_named(run_dir, monkeypatch, capsys):
    from jddp.workbench import hub as module

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", absent)
    assert main(["push", str(run_dir), "me/gpt"]) == 2
    assert "pip install 'jddp[hub]'" in capsys.readouterr().err
