"""The benchmarks run; an idle machine measures with them."""

import json
import re
import subprocess
import sys

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
