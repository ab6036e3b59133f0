"""Candidates are scored one key after another, and the largest batch is found by its memory."""

import itertools
import json
import math

import pytest

from jddp.config.files import load_config, with_overrides
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, DataError, ExitCode
from jddp.workbench.tune import main
from jddp.workbench.tuning import AS_IT_IS, BUCKETS, Score, TimedStep, largest_batch, measured, tune

pytestmark = pytest.mark.usefixtures("started_devices")
GB = 10**9
JOB = ["model.name=mlp", "data.global_batch_size=16", "mesh.num_devices=2"]


def small(**ddp):
    return Config(train={"num_steps": 1}, ddp=ddp)


def scored(config):
    """Buckets of 50 MB are the best, and better still in the flat layout; one form is refused."""
    reduction = config.ddp.reduction
    if reduction.overlap is True:
        raise ConfigError("overlap\nis refused.")
    seconds = 0.010 - 0.001 * (reduction.bucket_mb == [1.0, 50.0])
    return Score(seconds - 0.002 * (reduction.layout == "flat"), 40 * GB, 80 * GB, 0.25)


def test_each_key_is_varied_from_the_best_so_far_and_the_best_is_a_config(tmp_path):
    noted = []
    found = tune(small(), scored, "modelled", note=noted.append)
    assert noted == list(found.candidates)
    assert len(found.candidates) == 1 + len(BUCKETS) + 2 + 2
    best = {"ddp.reduction.bucket_mb": [1.0, 50.0], "ddp.reduction.layout": "flat"}
    assert found.best.keys == best
    assert "layout=flat is 1.429 times as fast as the config" in found.verdict
    (tmp_path / "best.yaml").write_text(found.fragment)
    config, _ = load_config(["fashion_mnist_cnn", str(tmp_path / "best.yaml")])
    assert config.ddp.reduction.bucket_mb == [1.0, 50.0]
    assert "7.00   25.0%   40.0  bucket_mb=[1.0,50.0] layout=flat" in str(found)
    assert "overlap is refused." in str(found)
    assert json.loads(json.dumps(found.as_json()))["best"] == best
    strategy = tune(small(strategy={"name": "fsdp"}), scored, "").candidates
    assert "ddp.strategy.regather" in {key for x in strategy for key in x.keys}
    found = tune(small(), scored, "modelled", seconds=-1.0)
    assert [x.keys for x in found.candidates] == [{}]
    assert "not tried, for want of time: 11 or more" in str(found)


def test_a_gpt_is_asked_for_remat_and_for_its_micro_batches_under_the_limit_of_memory():
    def score(config):
        remat, steps = config.model.kwargs["remat"], config.ddp.accumulate_steps
        needed = 90 if remat == "none" and steps < 4 else 40
        return Score(
            0.010 + 0.002 * (remat in (True, "blocks")) + 1e-3 * steps, needed * GB, 80 * GB
        )

    config = with_overrides(
        small(accumulate_steps=4), {"model.name": "gpt", "model.kwargs.remat": True}
    )
    found = tune(config, score, "modelled")
    tried = [x.keys.get("model.kwargs.remat") for x in found.candidates[1:3]]
    assert tried == ["none", "attention"]
    assert found.best.score.fits
    assert found.best.keys["model.kwargs.remat"] == "none"


def test_a_config_that_cannot_be_bettered_stays_and_one_that_does_not_fit_is_named():
    same = tune(small(), lambda config: Score(0.01, GB, math.inf), "measured")
    assert same.verdict == "The config is as fast as any candidate."
    assert (same.fragment, same.as_json()["candidates"][0]["limit"]) == ("", None)

    def barely(config):
        return Score(0.01 - 1e-6 * (config.ddp.reduction.bucket_mb == [25.0]), GB, math.inf)

    assert not tune(small(), barely, "modelled").best.keys
    large = tune(small(), lambda config: Score(0.01, 81 * GB, 80 * GB), "modelled")
    assert large.verdict.startswith("No candidate fits into the memory of a device")

    def only_leaf(config):
        return Score(0.01, (80 + (config.ddp.reduction.layout != "leaf")) * GB, 80 * GB)

    found = tune(small(), only_leaf, "modelled")
    assert found.verdict == "The config does not fit as it is; layout=leaf does."


@pytest.mark.parametrize("rows", [8, 100, 12_345])
def test_the_largest_batch_is_found_to_three_per_cent(rows):
    def score(config):
        return Score(0.01, config.data.global_batch_size * GB, rows * GB)

    found = largest_batch(small(), score, multiple_of=8)
    assert found.size % 8 == 0
    assert found.size <= rows
    assert rows < found.size + 8 or rows <= 1.04 * found.size
    assert found.score.bytes == found.size * GB
    assert not found.holds_all_data


def test_a_batch_is_no_larger_than_the_data_and_too_large_a_model_is_refused():
    def score(config):
        if config.data.global_batch_size > 100:
            raise DataError("too few")
        return Score(0.01, GB, 80 * GB)

    found = largest_batch(small(), score, multiple_of=8)
    assert found[:1] == (96,)
    assert found.holds_all_data
    with pytest.raises(ConfigError, match=r"A batch of 8 rows needs 90.0 GB"):
        largest_batch(small(), lambda config: Score(0.01, 90 * GB, 80 * GB), multiple_of=8)


def test_one_program_has_one_time_whatever_its_config_says():
    score = measured()
    config = load_config([], [*JOB, "ddp.reduction.bucket_mb=[50]"])[0]
    first = score(config)
    # The gradients of the model are one bucket of either size.
    assert score(with_overrides(config, {"ddp.reduction.bucket_mb": [100.0]})) is first
    assert score(with_overrides(config, {"ddp.reduction.layout": "flat"})) is not first


@pytest.mark.parametrize("factors, is_same", [([0.9, 1.2], True), ([0.8, 0.9], False)])
def test_a_step_that_is_faster_in_some_rounds_alone_is_no_faster(monkeypatch, factors, is_same):
    times = itertools.repeat(1.0)
    monkeypatch.setattr(TimedStep, "seconds", lambda step: next(times))
    score = measured()
    config = load_config([], JOB)[0]
    first = score(config)
    rounds = [(1.0, factor) for factor in factors] * 3
    times = iter([1.0, *itertools.chain.from_iterable(rounds)])  # one before the rounds
    other = score(with_overrides(config, {"ddp.reduction.layout": "flat"}))
    assert (other.seconds == first.seconds) == is_same


def test_the_command_prints_the_best_and_writes_it_where_it_is_asked(tmp_path, capsys):
    out = tmp_path / "best.yaml"
    assert main([*JOB, "--out", str(tmp_path)]) == ExitCode.FILE_SYSTEM
    assert "cannot be written: Is a directory." in capsys.readouterr().err
    assert main([*JOB, "--minutes", "-1", "--out", str(out)]) == ExitCode.DONE
    assert capsys.readouterr().err.startswith(f"jddp: {AS_IT_IS}: ")
    assert out.read_text() == ""
    assert main([*JOB, "--topology", "1x8"]) == ExitCode.USAGE
    assert "--topology needs --target" in capsys.readouterr().err
