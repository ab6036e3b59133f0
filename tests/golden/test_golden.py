"""Programs, orders, names and runs are as the stored ones, which an earlier commit has written."""

import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from runs import ROOT, environment

from golden import changes, orders, programs, resumed

STORED = Path(__file__).parent / "stored"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
OLDEST = version("jax").startswith("0.10.")  # another JAX traces to other equations


def stored(name):
    return json.loads((STORED / f"{name}.json").read_text())


def check_programs(cases):
    want = stored("programs")
    found = {", ".join(case): programs.program(*case) for case in cases}
    assert found == {name: want[name] for name in found}


@pytest.mark.skipif(not OLDEST, reason="programs are of the oldest JAX")
@pytest.mark.parametrize("model", ["conv", "nnx"])
def test_the_step_of_each_option_is_the_program_that_it_was(model):
    check_programs(case for case in programs.SINGLES if case[0] == model)


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST, reason="programs are of the oldest JAX")
def test_the_step_of_each_pair_of_options_is_the_program_that_it_was():
    check_programs(case for case in [*programs.SINGLES, *programs.PAIRS] if case[0] != "nnx")


@pytest.mark.parametrize("name", orders.ORDERS)
def test_the_first_rows_are_the_same_for_each_number_of_processes(name):
    assert {orders.rows(name, num) for num in orders.WORLDS} == {stored("orders")[name]}


def test_the_rows_of_an_evaluation_are_the_same_for_each_number_of_processes():
    assert {orders.evaluated(num) for num in orders.WORLDS} == {stored("orders")["evaluation"]}


@pytest.mark.parametrize("name", orders.SOURCES)
def test_the_rows_of_a_source_are_as_they_were(name, tmp_path):
    assert orders.source(name, tmp_path) == stored("orders")[name]


def surface():
    """The surface of the checkout, from a process that has imported nothing else."""
    command = [sys.executable, "-m", "golden.surface"]
    return json.loads(subprocess.check_output(command, env=environment(), text=True))


def declared(names):
    """Those of the names that the changelog has for the version that is not released yet."""
    section = re.search(r"^## .*\(not released yet\)\n(.*?)(?=^## \d|\Z)", CHANGELOG, re.M | re.S)[
        1
    ]
    return {name for name in names if re.search(rf"(?<![\w.-]){re.escape(name)}(?!\w)", section)}


def test_a_change_of_the_public_surface_is_in_the_changelog():
    found, want = surface(), stored("surface")
    names = changes.changed(want, found)
    assert not names - declared(names), changes.broken(want["names"], found["names"])


def test_griffe_reports_what_a_renamed_argument_breaks():
    names = stored("surface")["names"]
    renamed = {**names, "fit": names["fit"].replace("num_steps:", "steps:")}
    assert changes.changed({"names": names}, {"names": renamed}) == {"fit"}
    shown = changes.broken(names, renamed)
    assert [line for line in shown if "fit(num_steps)" in line and "removed" in line], shown


OF_TWO = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=OF_TWO * (y[1] == 2)) for x, y in resumed.RUNS.items()]
)
def test_a_stored_run_resumes_to_the_losses_that_it_had(name, tmp_path):
    with zipfile.ZipFile(STORED / "runs.zip") as runs:
        runs.extractall(tmp_path, [x for x in runs.namelist() if x.startswith(f"{name}/")])
    found = resumed.train_by_all(name, tmp_path / name, resumed.WHOLE)
    losses, want = resumed.losses_after(found, resumed.HALF), stored("runs")[name]
    assert losses.keys() == want.keys()
    for step, values in want.items():
        # In float32, on another machine, after at most six steps of Adam.
        np.testing.assert_allclose(losses[step], values, rtol=1e-3, atol=1e-5, err_msg=step)
