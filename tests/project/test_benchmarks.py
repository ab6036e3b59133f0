"""The benchmarks run; an idle machine measures with them."""

import json
import re
import subprocess
import sys
import tomllib

import gpu_jobs
import gpu_score
import pytest
from runs import ROOT

from jddp.workbench.prediction import MEASURED_ERROR

BENCHMARKS = ROOT / "benchmarks"


def run(*command):
    paths = {"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"}
    options = {"cwd": ROOT, "env": paths, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *map(str, command)], check=True, **options)
    return done.stdout.splitlines()


def test_predictions_are_held_against_published_points_of_all_kinds_of_networks():
    *rows, _, in_all, of_text = run(BENCHMARKS / "predictions.py")
    assert len(rows) == 34
    middle, worst = re.findall(r"\+([\d.]+)", in_all)
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


@pytest.mark.slow
def test_a_step_needs_the_memory_of_one_by_hand():
    rows = [row.split() for row in run(BENCHMARKS / "memory.py", "mlp")[1:]]
    assert [layout for _, layout, *_ in rows] == ["auto", "leaf", "flat"]
    assert all(float(ratio) <= 1.05 for *_, ratio in rows)


def test_sealed_predictions_score_by_whether_and_how_narrowly_they_hold_the_measurements(tmp_path):
    sealed = tmp_path / "sealed.toml"
    sealed.write_text("[H100x8.gpt.jddp]\nstep_ms = [30, 40]\nexposed = [0.0, 0.1]\nmfu = [0, 1]")
    row = {"devices": 8, "median_seconds": 0.02, "speed_over_by_hand": 0.9, "peak_bytes": None}
    rows = {
        "jddp": row | {"mfu": None},
        "torch": row | {"mfu": None},
        "broken": {"failure": "no memory"},
    }
    facts = {"device": "NVIDIA H100 80GB HBM3", "results": {"gpt": {"contenders": rows}}}
    time, exposed = gpu_score.compare(facts, sealed)  # This GPU has no peak to divide by.
    assert (time.is_inside, time.score) == (False, (10 + 10 * 10) / 20)
    assert (exposed.is_inside, exposed.score) == (True, pytest.approx(1.0))
    assert "1 of 2 inside" in gpu_score.table([time, exposed])
    assert gpu_score.compare(facts | {"device": "cpu"}) == []
    assert set(gpu_jobs.JOBS) == set(tomllib.loads(gpu_score.SEALED.read_text())["H100x8"])
