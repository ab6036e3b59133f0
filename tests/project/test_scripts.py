"""The README's commands are there, its links lead somewhere, and the scripts do what they say."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from runs import ROOT

NAMES = ("venv", "quickstart", "test", "check", "docs", "overlap", "notebook", "openmpi.sh")
NAMES += ("release", "lowest", "slurm.sbatch")
SCRIPTS = [ROOT / "scripts" / name for name in NAMES]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

OURS = re.compile(r"\bJDDP_[A-Z_]+\b")

# Stands in for Python: writes down how it was called, and "makes" a venv of itself.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@" >>"$CALLS"
case "$*" in
  *version_info*) exit "${TOO_OLD:-0}" ;;
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *"pip install"*) exit "${NO_NETWORK:-0}" ;;
esac
"""


def test_relative_links_of_pages_lead_somewhere_and_the_readme_has_its_two_commands():
    assert not [
        (page.name, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not re.match(r"https?://|mailto:|#", target)
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    shown = (ROOT / "README.md").read_text()
    assert "scripts/quickstart" in shown
    assert "scripts/test" in shown


def test_scripts_are_executable_bash():
    for script in [*SCRIPTS, ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)


def test_variables_that_pages_and_scripts_name_are_read_and_xla_flags_are_not_among_them():
    read = {name for path in ROOT.glob("jddp/**/*.py") for name in OURS.findall(path.read_text())}
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    for path in (*PAGES, *scripts):
        text = path.read_text()
        assert set(OURS.findall(text)) <= read, path
        # A flag that XLA does not know aborts a run: nothing that is copied sets one.
        copied = [text] if path in scripts else re.findall(r"```.*?```", text, re.S)
        assert not [x for x in copied if "XLA_FLAGS" in re.sub(r"#.*", "", x)], path


@pytest.mark.parametrize("name", ["Containerfile", "apptainer.def"])
def test_an_image_has_what_the_installation_reads_and_installs_extras_there_are(name):
    """Only somebody with a container runtime can build it."""
    recipe = re.sub(r"^\s*#.*\n", "", (ROOT / "scripts" / name).read_text(), flags=re.M)
    lines = [line.split() for line in recipe.replace("\\\n", " ").splitlines()]
    copies = [words[1:] for words in lines if words[:1] == ["COPY"]]
    copies += [words for words in lines if words[-1:] and words[-1].startswith("/opt/jddp/")]
    copied = {name for words in copies for name in words[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = {"pyproject.toml", PROJECT["readme"], *wheel["packages"], *wheel["force-include"]}
    read |= {name for name in PROJECT["license-files"] if "/" not in name}
    (install,) = (words for words in lines if "install" in words and "pip" in words)
    assert copied == read | {install[install.index("--constraint") + 1]}
    extras = re.fullmatch(r'"\.\[(.+)\]"', install[-1])[1].split(",")
    assert {x for x in extras if "$" not in x} <= set(PROJECT["optional-dependencies"])


def test_the_conda_recipe_needs_and_starts_what_the_package_does():
    recipe = yaml.safe_load((ROOT / "scripts" / "recipe.yaml").read_text())
    python, *needed = recipe["requirements"]["run"]
    assert python.startswith("python >=")
    assert [x.replace(" ", "") for x in needed] == PROJECT["dependencies"]
    build = recipe["requirements"]["host"][-1].replace(" ", "")
    assert build in PYPROJECT["build-system"]["requires"]
    assert recipe["context"]["version"] == PROJECT["version"]
    started = recipe["build"]["python"]["entry_points"]
    assert started == [f"{name} = {code}" for name, code in PROJECT["scripts"].items()]
    assert recipe["about"]["license"] == PROJECT["license"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with our scripts, and a stand-in for every Python on PATH."""
    for name in ("scripts", "bin", "root"):
        (tmp_path / name).mkdir()
    for script in SCRIPTS:
        shutil.copy(script, tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    for version in ("", "3", "3.11", "3.12", "3.13"):
        (fake := tmp_path / "bin" / f"python{version}").write_text(FAKE_PYTHON)
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path


def run(checkout, script, *arguments):
    command = [checkout / "scripts" / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def calls(checkout):
    """How Python was called since this was last asked."""
    lines = (checkout / "calls").read_text().splitlines()
    (checkout / "calls").write_text("")
    return lines


def test_quickstart_makes_an_environment_once_and_passes_its_arguments_on(checkout):
    assert run(checkout, "quickstart", "seed=1").returncode == 0
    first = calls(checkout)
    assert sum("pip install" in call for call in first) == 1
    assert f"--constraint {checkout}/constraints.txt" in "".join(first)
    assert first[-1] == "-m jddp.train seed=1"
    assert run(checkout, "quickstart", "run.dir=my runs").returncode == 0
    assert calls(checkout) == ["-c import pip", "-m jddp.train run.dir=my runs"]
    assert run(checkout, "test", "-m", "slow").returncode == 0
    *_, install, tests = calls(checkout)
    assert install.endswith(f"--editable {checkout}[dev]")
    assert re.fullmatch("-m pytest.* -m slow", tests)


def test_without_a_new_enough_python_the_scripts_say_what_is_missing(checkout, monkeypatch):
    monkeypatch.setenv("TOO_OLD", "1")
    monkeypatch.setenv("PYENV_ROOT", "/nonexistent")
    refused = run(checkout, "quickstart")
    assert refused.returncode == 69
    assert "no Python 3.11 or newer on PATH" in refused.stderr
    assert not (checkout / ".venv").exists()


RELEASES = [
    ({"CHANGELOG.md": "## Unreleased"}, "--check", "CHANGELOG.md has version none and"),
    ({"CITATION.cff": 'version: "0.1.1"'}, "--check", "CITATION.cff has version 0.1.1 and"),
    ({}, "", "CHANGELOG.md has no date for 0.1.0"),
    ({"CHANGELOG.md": "## 0.1.0 (2026-01-01)"}, "", "has changes that are not committed"),
]


@pytest.mark.parametrize("changed, options, message", RELEASES)
def test_a_release_is_refused_before_anything_is_built(checkout, changed, options, message):
    files = {"pyproject.toml": 'version = "0.1.0"', "CITATION.cff": "version: 0.1.0"}
    files["CHANGELOG.md"] = "## Unreleased\n\n## 0.1.0 (not released yet)\n\n## 0.0.9 (2026-01-01)"
    for name, text in (files | changed).items():
        (checkout / name).write_text(text + "\n")
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    refused = run(checkout, "release", *options.split())
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not (checkout / "calls").exists()


def test_how_to_cite_agrees_with_the_package_and_the_version_is_the_same_in_all_files():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["license"]
    subprocess.run([ROOT / "scripts" / "release", "--check"], check=True)
