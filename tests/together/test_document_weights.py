"""Weights of documents: written with the tokens, exact in the mean, for training alone."""

import json

import numpy as np
import pytest
from sweeps import swept

from jddp.commands.data import main
from jddp.config.schema import Config
from jddp.data import make_source
from jddp.data.source import spec_of
from jddp.data.sources.token_shards import DocumentWeights
from jddp.data.sources.tokenize import BYTES, Document, write_tokens
from jddp.errors import DataError
from jddp.job.job import build, train
from jddp.zoo.losses import next_token

pytestmark = pytest.mark.usefixtures("started_devices")

WEIGHTS = {"a": 0.5, "b": 2.0, "c": 0.0, "d": 1.0}  # by the letter of a document
HOW = ("cross", "mask", "pack")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    lines = [
        {"text": letter * (5 + i % 11) + str(i), "weight": weight}
        for i in range(40)
        for letter, weight in WEIGHTS.items()
    ]
    (folder / "some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenize = [str(folder / "tokens"), str(folder / "some.jsonl"), "--shard-tokens=700"]
    assert main(["tokenize", *tokenize]) == 0
    return folder / "tokens"


@pytest.mark.parametrize("documents", HOW)
def test_each_target_has_the_weight_of_its_document(folder, documents):
    kwargs = {"sequence_length": 24, "documents": documents}
    source = make_source("tokens", directory=str(folder), kwargs=kwargs)
    train_part = source.load().train
    assert spec_of(train_part) == source.spec
    batch = train_part.take(np.arange(len(train_part)))
    targets = batch["tokens"][:, 1:]
    is_valid = batch.get("mask", np.ones(targets.shape)) == 1
    for letter, weight in WEIGHTS.items():
        found = batch["weight"][is_valid & (targets == ord(letter))]
        assert len(found) > 50
        assert (found == weight).all()


def config(folder, run, num_devices, documents="pack", **kwargs):
    sizes = {"num_layers": 1, "num_heads": 2, "width": 8, "max_length": 32}
    return Config(
        data={
            "name": "tokens",
            "dir": str(folder),
            "global_batch_size": 12,
            "kwargs": {"sequence_length": 24, "documents": documents},
        },
        model={"name": "gpt", "kwargs": sizes},
        loss={"name": "next_token"},
        train={"num_epochs": 1},
        mesh={"num_devices": num_devices},
        run={"dir": run and str(run)},
    )


@pytest.mark.parametrize("documents", swept([*reversed(HOW)], every=3))
def test_a_step_on_weighted_documents_equals_one_device(folder, documents):
    job = build(config(folder, None, 4, documents))
    report = job.verify()
    assert report.passed, report


def test_the_loss_is_the_weighted_mean_in_training_and_the_plain_one_in_evaluation(folder):
    job = build(config(folder, None, 2))
    batch = next(iter(job.train_batches()))
    state = job.ddp.init(0, batch)
    losses = job.ddp.predict(
        state, [batch], lambda model, batch: next_token(model, batch, False)[0]
    )
    weights = batch["weight"] * batch["mask"]
    evaluated = job.ddp.evaluate(state, [batch])["loss"]
    assert evaluated == pytest.approx(
        (losses * batch["mask"]).sum() / batch["mask"].sum(), rel=1e-5
    )
    _, metrics = job.ddp.step(state, batch)
    assert metrics["loss"] == pytest.approx((losses * weights).sum() / weights.sum(), rel=1e-5)
    assert metrics["count"] == pytest.approx(weights.sum())


@pytest.mark.slow
def test_a_run_of_an_epoch_is_the_same_on_one_and_on_two_devices(folder, tmp_path):
    one, two = (train(config(folder, tmp_path / str(n), n)) for n in (1, 2))
    assert two.evaluate() == pytest.approx(one.evaluate(), rel=1e-4)


def test_documents_without_weights_write_none(tmp_path):
    texts = [f"text {i}" for i in range(40)]
    write_tokens(texts, tmp_path / "plain", tokenizer=BYTES)
    assert not [*(tmp_path / "plain").glob("*weights*")]
    write_tokens([*texts, Document("more", 3)], tmp_path / "more", tokenizer=BYTES)
    assert len([*(tmp_path / "more").glob("*weights*")]) == 1  # the other part has none
    kwargs = {"sequence_length": 8}
    data = make_source("tokens", directory=str(tmp_path / "more"), kwargs=kwargs).load()
    for part in (data.train, data.test):
        assert {*part.take(np.arange(len(part)))["weight"].ravel()} <= {1, 3}


@pytest.mark.parametrize("weight", ["-1", "NaN", '"2"', "null", "Infinity"])
def test_a_wrong_weight_is_named_with_its_line(tmp_path, weight, capsys):
    (tmp_path / "x.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "b", "weight": {weight}}}')
    assert main(["tokenize", str(tmp_path / "t"), str(tmp_path / "x.jsonl")]) == 65
    assert 'x.jsonl: line 2 has "weight"' in capsys.readouterr().err


def test_weights_of_other_documents_are_refused():
    with pytest.raises(DataError, match="weights of 2 documents are float64"):
        DocumentWeights(np.array([0, 4]), np.ones(3))
