"""The benchmarks run; what they measure is for an idle machine to say."""

import json
import subprocess
import sys

import pytest
from runs import ROOT

BENCHMARKS = ROOT / "benchmarks"


def run(*command, **environment):
    paths = {"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"}
    options = {"cwd": ROOT, "env": paths | environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *map(str, command)], check=True, **options)
    return done.stdout.splitlines()


@pytest.mark.long
def test_step_time_prints_a_row_for_each_comparison_and_a_line_of_json():
    names = ["trivial", "pmap", "loop"]
    *rows, line = run(BENCHMARKS / "step_time.py", "--rounds", 1, "--only", *names)
    assert [row.split()[0] for row in rows[1:]] == names
    measured = json.loads(line)
    assert list(measured["results"]) == names
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
def test_data_prints_a_row_for_each_figure_and_a_line_of_json():
    *rows, line = run(BENCHMARKS / "data.py", "--rounds", 1, "--only", "pipeline", "order")
    measured = json.loads(line)["results"]
    names = [(section, name) for section, values in measured.items() for name in values]
    assert [tuple(row.split()[:2]) for row in rows] == names
    assert measured["order"]["peak_kib"] < 1024


@pytest.mark.slow
@pytest.mark.parametrize("figures", ["overhead save", "overhead opened", "launch start death"])
def test_each_figure_has_a_row_and_a_place_in_the_line_of_json(figures):
    name, *parts = figures.split()
    *rows, line = run(BENCHMARKS / f"{name}.py", "--rounds", 1, "--only", *parts)
    measured = json.loads(line)["results"]
    assert len(rows) == sum(map(len, measured.values())) == 6
    assert all(value > 0 for part in measured.values() for value in part.values())


@pytest.mark.slow
def test_the_first_step_is_timed_for_each_number_of_leaves():
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import overhead, json"
    *_, line = run("-c", f"{code}; print(json.dumps(overhead.leaves(1, (3, 20))))")
    figures = ("plain seconds", "step / plain", "fit / plain")
    found = json.loads(line)
    assert list(found) == [f"{num} leaves: {figure}" for num in (3, 20) for figure in figures]
    assert min(found.values()) > 0


@pytest.mark.slow
def test_mutants_are_made_and_the_tests_notice_them():
    """Two of hundreds; benchmarks/README.md has the score of all."""
    files = ["--files", "jddp/reduce/plan.py"]
    *rows, of_file, score = run(BENCHMARKS / "mutation.py", *files, "--sample", 2, "--seed", 1)
    assert [json.loads(row)["outcome"] for row in rows] == ["killed"] * 2
    assert of_file == f"{score} {files[1]}"
    assert score == "killed 2 of 2 mutants: 100.0%"


@pytest.mark.slow
def test_coverage_is_printed_by_room():
    rows = run(BENCHMARKS / "coverage_by_room.py", "tests/parts/project/test_errors.py")
    shares = {row.split()[0]: row.split()[-1] for row in rows if row.endswith("%")}
    assert (shares["zoo"], shares["html"]) == ("0.0%", "0.0%")
    assert shares["errors"] > "50"


@pytest.mark.slow
def test_the_time_of_tests_is_printed_by_cause_and_file():
    rows = run(BENCHMARKS / "time_by_cause.py", "tests/parts/reduce/test_pairwise.py")
    names, *lines = [row.split() for row in rows if row.startswith(("seconds", "all", "parts"))]
    assert names[1:] == ["imports", "tracing", "lowering", "compiling", "processes", "the", "rest"]
    assert [line[0] for line in lines] == ["all", "parts/reduce/test_pairwise.py"]
    _, imports, _, lowering, *_ = lines[0]
    assert min(float(imports), float(lowering)) > 0


@pytest.mark.slow
def test_the_wire_carries_the_parameters_and_no_more():
    rows = [row.split() for row in run(BENCHMARKS / "wire.py", "mlp", "gpt")[1:]]
    assert {row[4] for row in rows} == {"1.0000"}
    assert all(int(reduces) <= int(buckets) for *_, reduces, buckets in rows)
    for _, wide, narrow in (rows[:3], rows[3:]):
        assert int(wide[3].replace(",", "")) == 2 * int(narrow[3].replace(",", ""))


def contend(tmp_path, *options, **environment):
    """What `gpu.py` prints of each contender, and what it knows."""
    out = tmp_path / "gpu.json"
    quick = ["--smoke", "--rounds", 2, "--turn-seconds", 0.01, "--out", out]
    _, *rows, line = run(BENCHMARKS / "gpu.py", *quick, *options, **environment)
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


@pytest.mark.slow
def test_contenders_that_get_no_time_are_reported_so(tmp_path):
    only = ["--only", "vit_b16", "--contenders", "by_hand", "jddp"]
    rows, _ = contend(tmp_path, *only, "--budget-seconds", 0.5)
    assert all("out of time" in row for row in rows.values())
    assert len(rows) == 2


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


@pytest.mark.long
def test_checkouts_finds_a_checkout_as_large_as_itself():
    rows = run(BENCHMARKS / "checkouts.py", BENCHMARKS.parent, "--rounds", 1)[1:]
    ratios = {name: float(ratio) for name, _, ratio, _ in (row.rsplit(maxsplit=3) for row in rows)}
    assert ratios["temporaries, bytes"] == ratios["arguments and results, bytes"] == 1
    assert all(ratio > 0 for ratio in ratios.values())
