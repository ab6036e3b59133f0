"""Weights are read from PyTorch's files and from folders as on the Hugging Face Hub."""

import json
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from states import equal

from jddp.checkpoint.weights import read_weights
from jddp.ground.errors import ConfigError, DataError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
TENSORS = {"a.weight": np.ones((2, 3), np.float32), "b.weight": np.arange(3, dtype=np.float32)}
TREE = {"a": {"weight": TENSORS["a.weight"]}, "b": {"weight": TENSORS["b.weight"]}}


@pytest.fixture
def shards(tmp_path):
    """A folder with each tensor in a file of its own, and their index."""
    places = dict(zip(TENSORS, (FIRST, SECOND), strict=True))
    for name, file in places.items():
        safetensors.numpy.save_file({name: TENSORS[name]}, tmp_path / file)
    index = {"metadata": {"total_size": 36}, "weight_map": places}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_a_folder_of_the_hub_is_read_whole_or_in_shards(shards):
    equal(read_weights(shards), TREE)
    for file in (FIRST, SECOND, INDEX):
        (shards / file).unlink()
    safetensors.numpy.save_file(TENSORS, shards / "model.safetensors")
    equal(read_weights(shards), TREE)


def of_index(folder, change):
    (folder / INDEX).write_text(change((folder / INDEX).read_text()))


FAULTS = {
    "no index": (lambda x: (x / INDEX).unlink(), f"{INDEX}, which lists its files, is missing"),
    "a shard is lost": (lambda x: (x / SECOND).unlink(), f"{INDEX} lists {SECOND}, which is not"),
    "an empty index": (lambda x: of_index(x, lambda _: "{}"), "weight_map"),
    "another file": (lambda x: of_index(x, lambda y: y.replace(SECOND, FIRST)), "b.weight"),
    "outside": (lambda x: of_index(x, lambda y: y.replace(SECOND, "../x")), "lists ../x, which"),
}


@pytest.mark.parametrize("damage, message", FAULTS.values(), ids=FAULTS)
def test_a_folder_that_lacks_its_index_or_a_shard_is_one_line(shards, damage, message):
    damage(shards)
    with pytest.raises(DataError, match=message) as caught:
        read_weights(shards)
    assert "\n" not in str(caught.value)


class Code:
    """An object that, were it unpickled, would be noticed."""

    was_run = False

    def __reduce__(self):
        return run, ()


def run():
    Code.was_run = True


def test_a_file_of_pytorch_is_read_by_pytorch_and_runs_no_code(tmp_path):
    torch = pytest.importorskip("torch")
    state = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in TENSORS.items()}
    for saved in (state, {"state_dict": state, "epoch": 3}, {"model": state, "optimizer": {}}):
        torch.save(saved, tmp_path / "x.pth")
        equal(read_weights(tmp_path / "x.pth"), TREE)
    torch.save({"x": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "half.bin")
    (half,) = jax.tree.leaves(read_weights(tmp_path / "half.bin"))
    assert (half.dtype.name, half.tolist()) == ("bfloat16", [1, 1])
    torch.save(state | {"code": Code()}, tmp_path / "code.pt")
    with pytest.raises(DataError, match=r"code\.pt holds no weights: Weights only load failed"):
        read_weights(tmp_path / "code.pt")
    assert not Code.was_run


def test_without_pytorch_its_files_are_refused_with_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install torch\. Or save .* as \.safetensors"):
        read_weights(tmp_path / "x.pt")
