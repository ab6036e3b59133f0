"""Training starts from given weights: whole or in part, from memory or from files."""

import functools
import json
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn
from flax import nnx
from judge import host
from runs import refused
from states import equal
from sweeps import swept
from tiny import MLP, ConvNet, NnxConvNet, Of, make_batch, make_batches, take_steps, wrapped

import jddp
from jddp.checkpoint.weights import read_weights
from jddp.commands.runs import checkpoint_command as checkpoint_main
from jddp.ground.errors import ConfigError, DataError, FileSystemError, UsageError


def flat(tree, mark):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator=mark): np.array(x) for p, x in leaves}


def make(kind, seed=0):
    return kind(nnx.Rngs(seed)) if issubclass(kind, nnx.Module) else kind()


@functools.cache
def trained(kind):
    ddp = wrapped(make(kind), donate=False)
    return ddp, take_steps(ddp, make_batches(2))[0]


def wider(m, x, train):
    """The ConvNet with another head."""
    x = nn.Conv(4, (3, 3), use_bias=False)(x.reshape(-1, 4, 4, 1))
    x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
    return nn.Dense(7)(nn.relu(x).mean((1, 2)))[:, :4]


def test_safetensors_of_anybody_s_are_taken_by_their_names_and_cast_to_what_the_model_has(tmp_path):
    ddp, state = trained(MLP)
    file = tmp_path / "weights.safetensors"
    for mark, given in ((".", file), ("/", str(file))):
        safetensors.numpy.save_file(flat(state.params, mark), file)
        equal(ddp.init(7, make_batch(), params=given).params, state.params)
    for dtype in (np.float16, jnp.bfloat16):
        halves = {k: x.astype(dtype) for k, x in flat(state.params, "/").items()}
        safetensors.numpy.save_file(halves, file)
        begun = ddp.init(0, make_batch(), params=file)
        assert {x.dtype.name for x in jax.tree.leaves(begun.params)} == {"float32"}
    kept = ddp.init(0, make_batch(), params=jax.tree.map(jnp.float16, host(state.params)))
    assert {x.dtype.name for x in jax.tree.leaves(kept.params)} == {"float16"}


@pytest.mark.parametrize("kind", swept([NnxConvNet, ConvNet], every=2))
def test_a_run_and_what_is_exported_of_it_are_taken(tmp_path, kind):
    run = jddp.fit(wrapped(make(kind)), [make_batch()] * 2, num_steps=2, run_dir=tmp_path / "run")
    paths = [str(tmp_path / name) for name in ("run", "out.safetensors")]
    assert checkpoint_main(["export", *paths]) == 0
    fresh = wrapped(make(kind, seed=1))
    for source in paths:
        begun = fresh.init(7, make_batch(), params=source)
        equal(begun.params, run.state.params)
        equal(begun.model_state.get("rest"), run.state.model_state.get("rest"))
    assert int(fresh.step(begun, make_batch())[0].step) == 1


def test_a_file_that_holds_no_weights_is_one_line(tmp_path):
    for name, content, error, message in (
        ("absent.safetensors", None, FileSystemError, "does not exist"),
        ("w.safetensors", b"nonsense", DataError, "holds no weights"),
        ("w.msgpack", b"", ConfigError, "unknown format"),
        ("w.pickle", b"", ConfigError, "unknown format"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with refused(error, message):
            wrapped().init(0, make_batch(), params=tmp_path / name)


def test_a_part_is_taken_and_the_rest_is_made_with_a_report(caplog):
    ddp, state = trained(ConvNet)
    given = host(ddp.model(state))
    given["params"]["Extra"] = {"kernel": np.zeros(3)}
    other = wrapped(Of(wider))
    own = host(other.init(5, make_batch()).params)
    with caplog.at_level(logging.WARNING, "jddp"):
        begun = other.init(5, make_batch(), params=given, partial=True)
    equal(begun.params["Conv_0"], state.params["Conv_0"])
    equal(begun.model_state, state.model_state)
    equal(begun.params["Dense_0"], own["Dense_0"])
    loaded = other.loaded
    bias, kernel = "bias ((4,) given, (7,) here)", "kernel ((4, 4) given, (4, 7) here)"
    assert loaded.unused == ("Extra/kernel",)
    assert loaded.made == (f"Dense_0/{bias}", f"Dense_0/{kernel}")
    assert str(loaded) in caplog.text
    _, state = trained(NnxConvNet)
    other = wrapped(NnxConvNet(nnx.Rngs(1)))
    given = {"conv": host(state.params)["conv"]}
    begun = other.init(0, params=given, partial=True)
    equal(begun.params["conv"], state.params["conv"])
    assert set(other.loaded.made) == {"dense/bias", "dense/kernel", "norm/bias", "norm/scale"}


@pytest.mark.parametrize("kind", [MLP, NnxConvNet])
def test_what_does_not_fit_is_refused_by_its_path(kind):
    ddp, state = trained(kind)
    params = host(state.params)
    params["Unknown"] = params.pop(sorted(params)[-1])
    with pytest.raises(ConfigError, match=r"does not fit the model at \d places; .*partial=True"):
        ddp.init(0, make_batch(), params=params)


def test_parameters_alone_are_taken_and_an_unknown_collection_or_a_part_of_nothing_is_refused():
    ddp, state = trained(ConvNet)
    begun = ddp.init(0, make_batch(), params={"params": host(state.params)})
    equal(begun.params, state.params)
    equal(begun.model_state, ddp.init(0, make_batch()).model_state)
    given = {**ddp.model(state), "cache": {"key": np.zeros(3)}}
    with pytest.raises(ConfigError, match="'cache/key'.*the model has nothing"):
        ddp.init(0, make_batch(), params=given)
    for given in ({"batch": make_batch()}, {"params": {}}):
        with pytest.raises(UsageError, match="needs params=, and for a Linen model batch="):
            wrapped().init(0, partial=True, **given)


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


def outside(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace(SECOND, "../x"))


FAULTS = {
    "no index": (lambda x: (x / INDEX).unlink(), f"{INDEX}, which lists its files, is missing"),
    "a shard is lost": (lambda x: (x / SECOND).unlink(), f"{INDEX} lists {SECOND}, which is not"),
    "an empty index": (lambda x: (x / INDEX).write_text("{}"), "weight_map"),
    "outside": (outside, "lists ../x, which"),
}


@pytest.mark.parametrize("damage, message", FAULTS.values(), ids=FAULTS)
def test_a_folder_that_lacks_its_index_or_a_shard_is_one_line(shards, damage, message):
    damage(shards)
    with refused(DataError, message):
        read_weights(shards)


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
