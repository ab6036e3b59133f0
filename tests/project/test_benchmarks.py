"""The benchmarks run; what they measure is for an idle machine to say."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from runs import ROOT
from sweeps import swept

from jddp.workbench.modelled.prediction import MEASURED_ERROR

BENCHMARKS = ROOT / "benchmarks"


def run(*command, **environment):
    paths = {"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"}
    options = {"cwd": ROOT, "env": paths | environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *map(str, command)], check=True, **options)
    return done.stdout.splitlines()


def test_a_prediction_ends_with_its_last_bucket_which_waits_for_the_one_before(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    predictions = importlib.import_module("predictions")
    layers = [predictions.Layer(100, 0.25), predictions.Layer(20, 0.25), predictions.Layer(80, 0.5)]
    ready = list(predictions.buckets(layers, 100))
    assert ready == [(0.25, 100), (1.0, 100)]

    class Fabric:
        def seconds(self, num_bytes):
            return num_bytes / 100

    # 3 s, of which 2 are the backward pass: a bucket after 1.5 s until 2.5, and one from 3 to 4.
    assert predictions.step_seconds(ready, 3.0, 1, Fabric()) == pytest.approx(4.0)
    assert predictions.step_seconds(ready, 3.0, 2, Fabric()) == pytest.approx(7.0)
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
    for row in rows[1:]:
        published, predicted, serial, error = map(float, row[49:].split()[:4])
        assert serial <= predicted <= 1
        assert error == pytest.approx(100 * (predicted - published), abs=0.11)  # three decimals


SMALL = {"step_time": ("trivial", "pmap", "loop"), "data": ("pipeline", "order")}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_a_row_for_each_part_and_a_line_of_json(name):
    *rows, line = run(BENCHMARKS / f"{name}.py", "--rounds", 1, "--only", *SMALL[name])
    measured = json.loads(line)
    assert {row.split()[0] for row in rows} >= {*SMALL[name]} == measured["results"].keys()
    assert {"processor", "date", "command"} <= measured.keys()


@pytest.mark.long
def test_gallery_prints_a_row_for_each_model_and_a_line_of_json():
    names = ["tied_autoencoder", "vae"]
    *rows, line = run(BENCHMARKS / "gallery.py", "--rounds", 1, "--only", *names)
    assert [row.split()[0] for row in rows[1:]] == names
    for row in json.loads(line)["results"].values():
        assert row["error"] < 1e-5  # float32: sums of 128 rows in another order
        assert row["all_reduces"] == 1


@pytest.mark.long
def test_modes_prints_a_row_for_each_and_fewer_bytes_for_what_is_compressed():
    names = ["PowerSGD, rank 1", "signs"]
    *rows, line = run(BENCHMARKS / "modes.py", "--rounds", 1, "--steps", 1, "--only", *names)
    results = json.loads(line)["results"]
    assert list(results) == ["mean", *names, "mean again"]
    assert [row[:18].strip() for row in rows[1:]] == list(results)
    for name in names:
        assert results[name]["wire_kib"] < results["mean"]["wire_kib"] / 5
        assert results[name]["memory_kib"] > 0 == results["mean"]["memory_kib"]


@pytest.mark.long
def test_collectives_counts_every_bucket_of_the_flat_layout():
    rows = [row.split(maxsplit=4) for row in run(BENCHMARKS / "collectives.py")[1:]]
    other = {int(count) - int(buckets) for _, layout, buckets, count, _ in rows if layout == "flat"}
    assert other == {3 * 2 + 1}  # Three batch norms, forward and backward, and the metrics.


@pytest.mark.slow
def test_a_step_needs_the_memory_of_one_by_hand():
    rows = [row.split() for row in run(BENCHMARKS / "memory.py", "mlp")[1:]]
    assert [layout for _, layout, *_ in rows] == ["auto", "leaf", "flat"]
    assert all(float(ratio) <= 1.05 for *_, ratio in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "figures", swept(["overhead save", "overhead opened", "launch start death"], every=3)
)
def test_each_figure_has_a_row_and_a_place_in_the_line_of_json(figures):
    name, *parts = figures.split()
    *rows, line = run(BENCHMARKS / f"{name}.py", "--rounds", 1, "--only", *parts)
    measured = json.loads(line)["results"]
    assert len(rows) == sum(map(len, measured.values())) == 6
    assert all(value > 0 for part in measured.values() for value in part.values())


@pytest.mark.long
def test_mutants_are_made_and_the_tests_notice_them():
    """Two of hundreds; benchmarks/README.md has the score of all."""
    files = ["--files", "jddp/reduce/plan.py"]
    *rows, of_file, score = run(BENCHMARKS / "mutation.py", *files, "--sample", 2, "--seed", 1)
    assert [json.loads(row)["outcome"] for row in rows] == ["killed"] * 2
    assert of_file == f"{score} {files[1]}"
    assert score == "killed 2 of 2 mutants: 100.0%"


@pytest.mark.long
def test_the_wire_carries_the_parameters_and_no_more():
    rows = [row.split() for row in run(BENCHMARKS / "wire.py", "mlp", "gpt")[1:]]
    assert {row[4] for row in rows} == {"1.0000"}
    assert all(int(reduces) <= int(buckets) for *_, reduces, buckets in rows)
    for _, wide, narrow in (rows[:3], rows[3:]):
        assert int(wide[3].replace(",", "")) == 2 * int(narrow[3].replace(",", ""))


def contend(tmp_path, *options, **environment):
    """What `gpu.py` prints of each contender, and what it knows."""
    out = tmp_path / "gpu.json"
    quick = ["--rounds", 2, "--turn-seconds", 0.01, "--out", out]
    smoke = [] if "--smoke" in options else ["--smoke"]
    _, *rows, line = run(BENCHMARKS / "gpu.py", *smoke, *quick, *options, **environment)
    assert json.loads(line) == json.loads(out.read_text())
    return {tuple(row.split()[:2]): row for row in rows}, json.loads(line)


@pytest.mark.long
def test_contenders_for_a_gpu_take_turns_on_every_model(tmp_path):
    names = ["jddp", "torch_compiled"]
    rows, measured = contend(tmp_path, "--contenders", *names)
    assert list(rows) == [(job, name) for job in measured["results"] for name in names]
    for job, result in measured["results"].items():
        units = result["rows"] * result["units_per_row"]
        for name, row in result["contenders"].items():
            assert len(row["turns"]) == 2, (job, name, row)
            # Written to six digits.
            assert row["per_second"] * row["median_seconds"] == pytest.approx(units, rel=1e-5)
            assert 0 < row["loss"] < 10  # of random rows, some steps on
            assert f"{row['speed_over_torch_compiled']:.3f}" in rows[job, name]
    assert {"jax", "flax", "optax", "torch"} <= measured["versions"].keys()
    assert measured["device"] == "cpu"


@pytest.mark.long
def test_contenders_that_fail_say_why_in_their_rows_and_the_others_continue(tmp_path):
    (tmp_path / "torch.py").write_text("raise MemoryError('there was none')")
    rows, measured = contend(tmp_path, "--only", "gpt2_124m", PYTHONPATH=str(tmp_path))
    contenders = measured["results"]["gpt2_124m"]["contenders"]
    for name in ("torch", "torch_compiled"):
        assert contenders[name]["failure"] == "exit code 1: MemoryError: there was none"
        assert rows["gpt2_124m", name].endswith("MemoryError: there was none")
    for name, num_devices in {"by_hand": 1, "jddp": 1, "jddp_of_8": 8}.items():
        assert contenders[name]["devices"] == num_devices
        assert contenders[name]["speed_over_by_hand"] > 0
        assert contenders[name]["speed_over_torch_compiled"] is None


@pytest.mark.long
@pytest.mark.parametrize("num", swept([1, 2], every=2))
def test_all_devices_are_used_by_jddp_and_by_processes_of_torch(tmp_path, num):
    only = ["--only", "resnet50", "--contenders", "by_hand", "jddp", "jddp_sync", "torch"]
    rows, measured = contend(tmp_path, "--smoke", num, *only)
    contenders = measured["results"]["resnet50"]["contenders"]
    devices = {"by_hand": 1, "jddp": num, "jddp_sync": num, "torch": num}
    assert {name: row["devices"] for name, row in contenders.items()} == devices
    allowed = 0.01 if num == 1 else 0.3  # of other rows
    losses = {name: row["early_loss"] for name, row in contenders.items()}
    assert losses["jddp"] == pytest.approx(losses["by_hand"], rel=allowed)
    assert "LOSS DIFFERS" not in rows["resnet50", "jddp"]
    assert all(f"{row['early_loss']:.3f}" in rows["resnet50", n] for n, row in contenders.items())


def gpu_module(monkeypatch, name):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(name)


def test_a_loss_that_is_not_that_by_hand_is_shown(monkeypatch):
    gpu = gpu_module(monkeypatch, "gpu")
    job = gpu.SMOKE_JOBS["resnet50"]
    other = {"turns": [1.0], "device": "cpu", "devices": 1, "peak_bytes": None}
    losses = {"by_hand": 2.0, "jddp": 2.01, "jddp_sync": 2.1, "torch": 2.1, "jddp_of_8": 9.0}
    facts = {name: other | {"early_loss": loss} for name, loss in losses.items()}
    rows = {name: gpu.format_row("resnet50", job, name, facts) for name in facts}
    assert {name for name in rows if "LOSS DIFFERS" in rows[name]} == {"jddp_sync"}
    assert rows["jddp_sync"].endswith("2.100  LOSS DIFFERS by +5.0%")
    several = other | {"devices": 2, "early_loss": 2.1}
    assert gpu.verdict("jddp", several, facts["by_hand"]) == ""  # of more rows
    assert gpu.verdict("jddp", several | {"early_loss": "nan"}, facts["by_hand"])
    assert gpu.verdict("jddp", several, {"failure": "out of time"}) == ""


def test_operations_are_those_that_papers_count(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_jobs import JOBS

    billions = {name: job.flops_per_row() / 1e9 for name, job in JOBS.items()}
    # 4.09 and 17.6 billion multiplications an image, the latter with a class token (torchvision's
    # tables of models, "GFLOPS"); 6 for each of 124 M parameters and 12 layers x width x length a
    # token (Chowdhery et al.), where positions take part in no product.
    assert billions["resnet50"] == pytest.approx(6 * 4.09, rel=1e-3)
    assert billions["vit_b16"] == pytest.approx(6 * 17.56, rel=1e-2)
    gpt2 = 1024 * (6 * 124e-3 + 12 * 12 * 768 * 1024 / 1e9)
    assert billions["gpt2_124m"] == pytest.approx(gpt2, rel=1e-2)
