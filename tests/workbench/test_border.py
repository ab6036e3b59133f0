"""Without `jddp/workbench` the core works, and what the tools add to it is refused in one line."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest
from house import PACKAGE

ROOT = PACKAGE.parent
QUICK = ["ground", "config/test_versions.py", "engine/test_mesh.py", "trainer/test_spikes.py"]
REFUSED = ["report x", "tune", "compare x", "train --sweep seed=0,1", "launch --ray -m jddp.train"]
REFUSED += ["explain --target h100", "train --dry-run --target h100", "data tokenize a b"]
REFUSED += ["train --dry-run ddp.strategy=logical_replicas ddp.strategy.number=8"]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A folder with the package without its tools."""
    folder = tmp_path_factory.mktemp("core")
    left_out = shutil.ignore_patterns("workbench", "__pycache__")
    shutil.copytree(PACKAGE, folder / "jddp", ignore=left_out)
    shutil.copytree(ROOT / "configs", folder / "configs")
    return folder


def run(folder, *arguments):
    command = [sys.executable, *map(str, arguments)]
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.slow  # A minute: it trains.
def test_the_core_passes_its_tests_and_trains_without_the_tools(core):
    paths = [ROOT / "tests" / name for name in QUICK]
    done = run(core, "-m", "pytest", "-q", "-n", 0, "-c", ROOT / "pyproject.toml", *paths)
    assert done.returncode == 0, done.stdout
    done = run(core, "-m", "jddp.train", "train.num_steps=2", "run.dir=run")
    assert done.returncode == 0, done.stderr
    assert (core / "run" / "metrics.jsonl").exists()
    assert not (core / "run" / "report.html").exists()


def test_a_command_or_option_of_the_tools_is_refused_in_a_line(core):
    script = f"""
import contextlib, io
from jddp.__main__ import main
for line in {REFUSED}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(line.split()) == 2, line
    assert "needs jddp.workbench" in said.getvalue(), said.getvalue()
    assert said.getvalue().count(chr(10)) == 1, said.getvalue()
"""
    done = run(core, "-c", script)
    assert done.returncode == 0, done.stderr


def test_each_entry_point_of_the_tools_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, points in project["entry-points"].items():
        for name, value in points.items():
            assert callable(EntryPoint(name, value, group).load())
