"""The benchmarks run; an idle machine measures with them."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from runs import ROOT

from jddp.workbench.prediction import MEASURED_ERROR

BENCHMARKS = ROOT / "benchmarks"


def run(*command, **environment):
    paths = {"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"}
    options = {"cwd": ROOT, "env": paths | environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *map(str, command)], check=True, **options)
    return done.stdout.splitlines()


def imported(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(name)


def test_a_prediction_ends_with_its_last_bucket_which_waits_for_the_one_before(monkeypatch):
    predictions = imported("predictions", monkeypatch)
    layers = [predictions.Layer(100, 0.25), predictions.Layer(20, 0.25), predictions.Layer(80, 0.5)]
    ready = list(predictions.buckets(layers, 100))
    assert ready == [(0.25, 100), (1.0, 100)]

    class Fabric:
        def seconds(self, num_bytes):
            return num_bytes / 100

    # 3 s, of which 2 are the backward pass: a bucket after 1.5 s until 2.5, and one from 3 to 4.
    assert predictions.step_seconds(ready, 3.0, 1, Fabric()) == pytest.approx(4.0)
    assert predictions.step_seconds(ready, 0.3, 1, Fabric()) == pytest.approx(2.15)
    assert predictions.step_seconds(ready, 3.0, 2, None) == 6.0


def test_predictions_are_held_against_published_points_of_all_kinds_of_networks():
    *rows, _, in_all, of_text = run(BENCHMARKS / "predictions.py")
    assert len(rows) == 34
    middle, worst = re.fullmatch(
        r"all: 33 points, median error \+(.*), worst \+(.*)", in_all
    ).groups()
    assert f"published runs reach {middle} points less, at worst {worst}" == MEASURED_ERROR
    assert of_text.startswith("text models: 10 points, median error ")


ROWS = {
    "step_time": ["trivial", "pmap", "loop"],
    "data": ["pipeline", "order"],
    "gallery": ["tied_autoencoder", "vae"],
    "overhead": ["save"],
    "launch": ["start", "death"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_prints_rows_and_a_line_of_json_with_a_place_for_each_part(name):
    *rows, line = run(BENCHMARKS / f"{name}.py", "--rounds", 1, "--only", *ROWS[name])
    measured = json.loads(line)
    assert {*ROWS[name]} == measured["results"].keys()
    assert len(rows) >= len(ROWS[name])
    assert {"processor", "date", "command"} <= measured.keys()


@pytest.mark.long
def test_modes_prints_a_row_for_each_and_fewer_bytes_for_what_is_compressed():
    names = ["PowerSGD, rank 1", "signs"]
    *rows, line = run(BENCHMARKS / "modes.py", "--rounds", 1, "--steps", 1, "--only", *names)
    results = json.loads(line)["results"]
    assert [row[:18].strip() for row in rows[1:]] == list(results) == ["mean", *names, "mean again"]
    for name in names:
        assert results[name]["wire_kib"] < results["mean"]["wire_kib"] / 5
        assert results[name]["memory_kib"] > 0 == results["mean"]["memory_kib"]


@pytest.mark.slow
def test_a_step_needs_the_memory_of_one_by_hand():
    rows = [row.split() for row in run(BENCHMARKS / "memory.py", "mlp")[1:]]
    assert [layout for _, layout, *_ in rows] == ["auto", "leaf", "flat"]
    assert all(float(ratio) <= 1.05 for *_, ratio in rows)


def test_a_loss_that_is_not_that_by_hand_is_shown(monkeypatch):
    gpu = imported("gpu", monkeypatch)
    job = gpu.SMOKE_JOBS["resnet50"]
    other = {"turns": [1.0], "device": "cpu", "devices": 1, "peak_bytes": None}
    losses = {"by_hand": 2.0, "jddp": 2.01, "jddp_sync": 2.1, "torch": 2.1, "jddp_of_8": 9.0}
    facts = {name: other | {"early_loss": loss} for name, loss in losses.items()}
    rows = {name: gpu.format_row("resnet50", job, name, facts) for name in facts}
    assert {name for name in rows if "LOSS DIFFERS" in rows[name]} == {"jddp_sync"}


def test_operations_are_those_that_papers_count(monkeypatch):
    jobs = imported("gpu_jobs", monkeypatch).JOBS
    billions = {name: job.flops_per_row() / 1e9 for name, job in jobs.items()}
    # 4.09 and 17.6 billion multiplications an image, the latter with a class token (torchvision's
    # tables of models, "GFLOPS"); 6 for each of 124 M parameters and 12 layers x width x length a
    # token (Chowdhery et al.), where positions take part in no product.
    assert billions["resnet50"] == pytest.approx(6 * 4.09, rel=1e-3)
    assert billions["vit_b16"] == pytest.approx(6 * 17.56, rel=1e-2)
    gpt2 = 1024 * (6 * 124e-3 + 12 * 12 * 768 * 1024 / 1e9)
    assert billions["gpt2_124m"] == pytest.approx(gpt2, rel=1e-2)
