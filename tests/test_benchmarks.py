"""The benchmarks run; what they measure is for an idle machine to say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(*command):
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=BENCHMARKS.parent,
        env={"PYTHONPATH": str(BENCHMARKS.parent), "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


@pytest.mark.slow
def test_step_time_prints_a_row_for_each_comparison_and_a_line_of_json():
    names = ["trivial", "pmap", "loop"]
    *rows, line = run(BENCHMARKS / "step_time.py", "--rounds", 1, "--only", *names)
    assert [row.split()[0] for row in rows[1:]] == names
    measured = json.loads(line)
    assert list(measured["results"]) == names
    assert {"processor", "date", "command"} <= measured.keys()


@pytest.mark.slow
def test_gallery_prints_a_row_for_each_model_and_a_line_of_json():
    names = ["tied_autoencoder", "vae"]
    *rows, line = run(BENCHMARKS / "gallery.py", "--rounds", 1, "--only", *names)
    assert [row.split()[0] for row in rows[1:]] == names
    for row in json.loads(line)["results"].values():
        assert row["error"] < 1e-5  # float32: sums of 128 rows in another order
        assert row["all_reduces"] == 1


@pytest.mark.slow
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
def test_data_prints_a_row_for_each_figure_and_a_line_of_json():
    *rows, line = run(BENCHMARKS / "data.py", "--rounds", 1, "--only", "pipeline", "order")
    measured = json.loads(line)["results"]
    names = [(section, name) for section, values in measured.items() for name in values]
    assert [tuple(row.split()[:2]) for row in rows] == names
    assert measured["order"]["peak_kib"] < 1024


@pytest.mark.slow
def test_overhead_prints_a_row_for_each_figure_and_a_line_of_json():
    *rows, line = run(BENCHMARKS / "overhead.py", "--rounds", 1, "--only", "save")
    measured = json.loads(line)["results"]["save"]
    assert len(rows) == len(measured) == 6
    assert all(value > 0 for value in measured.values())


@pytest.mark.slow
def test_launch_prints_a_row_for_each_figure_and_a_line_of_json():
    *rows, line = run(BENCHMARKS / "launch.py", "--rounds", 1, "--only", "start", "death")
    measured = json.loads(line)["results"]
    assert len(rows) == sum(map(len, measured.values())) == 6
    assert all(value > 0 for part in measured.values() for value in part.values())


@pytest.mark.slow
def test_mutants_are_made_and_the_tests_notice_them():
    """Two of hundreds; benchmarks/README.md has the score of all."""
    files = ["--files", "jddp/reduce/plan.py"]
    *rows, score = run(BENCHMARKS / "mutation.py", *files, "--sample", 2, "--seed", 1)
    assert [json.loads(row)["outcome"] for row in rows] == ["killed"] * 2
    assert score == "killed 2 of 2 mutants: 100.0%"


@pytest.mark.slow
def test_the_wire_carries_the_parameters_and_no_more():
    rows = [row.split() for row in run(BENCHMARKS / "wire.py", "mlp", "gpt")[1:]]
    assert {row[4] for row in rows} == {"1.0000"}
    assert all(int(reduces) <= int(buckets) for *_, reduces, buckets in rows)
    for _, wide, narrow in (rows[:3], rows[3:]):
        assert int(wide[3].replace(",", "")) == 2 * int(narrow[3].replace(",", ""))
