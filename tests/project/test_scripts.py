"""The README's commands are there, its links lead somewhere, and the scripts do what they say."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from runs import ROOT

from jddp.__main__ import COMMANDS

NAMES = ("venv", "quickstart", "test", "check", "docs", "overlap", "notebook", "openmpi.sh")
NAMES += ("release", "slurm.sbatch")
SCRIPTS = [ROOT / "scripts" / name for name in NAMES]
TEMPLATES = ("slurm.sbatch", "openmpi.sh", "jobset.yaml", "trainjob.yaml", "skypilot.yaml")
TEMPLATES += ("ray_cluster.yaml",)
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


def commands(page):
    """The lines of the page's shell blocks that start one of our commands, without prompts."""
    for block in re.findall(r"```(?:bash|console|sh)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and (words[0].startswith("scripts/") or words[:2] == ["python", "-m"]):
                yield words


def is_there(words):
    """Whether what a command starts exists, and each config that it names."""
    if words[0].startswith("scripts/"):
        exists = os.access(ROOT / words[0], os.X_OK)
    else:
        exists = importlib.util.find_spec(words[2]) is not None
    configs = [word for word in words if word.startswith("configs/")]
    return exists and all((ROOT / config).exists() for config in configs)


def test_commands_and_relative_links_of_pages_lead_somewhere():
    assert not [
        (page.name, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not re.match(r"https?://|mailto:|#", target)
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    started = [(page.name, words) for page in PAGES for words in commands(page)]
    assert not [(page, words) for page, words in started if not is_there(words)]
    shown = (ROOT / "README.md").read_text()
    assert "scripts/quickstart" in shown
    assert "scripts/test" in shown


def test_no_module_imports_conftest_of_which_there_are_several():
    """Whichever is loaded last has the name: files of several folders did not collect together."""
    pattern = re.compile(r"^(from|import) conftest\b", re.M)
    assert not [p for p in (ROOT / "tests").rglob("*.py") if pattern.search(p.read_text())]


@pytest.mark.slow
def test_what_is_left_out_is_named_and_a_test_that_aborts_ends_a_run(tmp_path, commands_by_marker):
    options = PYPROJECT["tool"]["pytest"]["ini_options"]
    known = set(commands_by_marker)
    assert known == {marker.partition(":")[0] for marker in options["markers"]}
    assert known == set(re.findall(r"not (\w+)", options["addopts"][-1]))
    (tmp_path / "test_one.py").write_text("import os\n\ndef test_abort():\n    os.abort()\n")
    more = "import pytest\n\n@pytest.mark.parametrize('i', range(9))\ndef test_pass(i):\n    pass\n"
    (tmp_path / "test_two.py").write_text(more)
    (line,) = re.findall(r"exec .* pytest (.*) .*", (ROOT / "scripts/test").read_text())
    command = [sys.executable, "-m", "pytest", *line.split(), "--dist", "loadgroup"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "crashed while running 'test_one.py::test_abort'" in result.stdout
    assert result.returncode != 0


def test_scripts_are_executable_bash():
    for script in [*SCRIPTS, ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_begins_with_what_to_change_whose_keys_occur_below(name):
    text = (ROOT / "scripts" / name).read_text()
    head, lines = re.match(r"((?:#.+\n)+)#\n# What to change.*:\n((?:#   .+\n)+)#\n", text).groups()
    assert head.count("\n") <= 2
    assert lines.count("\n") < 5  # with the first line, five
    below = re.sub(r"^ *#( .*|)\n", "", text, flags=re.M)  # alternatives and #SBATCH have no space
    for keys in re.findall(r"^#   (.+?): ", lines, re.M):
        for key in keys.split(", "):
            assert re.search(rf"(?<![\w-]){re.escape(key)}(?=[:=(, ]|$)", below, re.M), key
    assert len(re.findall(r"^#   [^ :]+(?:, [^ :]+)*: ", lines, re.M)) == lines.count("\n")


def test_variables_that_pages_and_scripts_name_are_read_and_xla_flags_are_not_among_them():
    read = {name for path in ROOT.glob("jddp/**/*.py") for name in OURS.findall(path.read_text())}
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    for path in (*PAGES, *scripts):
        text = path.read_text()
        assert set(OURS.findall(text)) <= read, path
        # A flag that XLA does not know aborts a run: nothing that is copied sets one.
        copied = [text] if path in scripts else re.findall(r"```.*?```", text, re.S)
        assert not [x for x in copied if "XLA_FLAGS" in re.sub(r"#.*", "", x)], path


def test_the_container_recipe_copies_what_the_installation_reads_and_installs_extras_there_are():
    """Only somebody with a container runtime can build it."""
    recipe = re.sub(r"^\s*#.*\n", "", (ROOT / "scripts" / "Containerfile").read_text(), flags=re.M)
    found = {}
    for line in recipe.replace("\\\n", " ").splitlines():
        kind, *words = line.split() or [""]
        found.setdefault(kind, []).append(words)
    assert found.keys() == {*("FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD"), ""}
    assert next(filter(None, found)) == "FROM"
    (version,) = re.findall(r"python:(\d\.\d+)-slim", found["FROM"][0][0])
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    # Kubernetes' runAsNonRoot takes nothing else for one.
    ((user,),) = found["USER"]
    assert int(user) > 0
    copied = {name for words in found["COPY"] for name in words[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = {"pyproject.toml", PROJECT["readme"], *wheel["packages"], *wheel["force-include"]}
    read |= {name for name in PROJECT["license-files"] if "/" not in name}
    (install,) = (words for words in found["RUN"] if words[:2] == ["pip", "install"])
    assert copied == read | {install[install.index("--constraint") + 1]}
    ((cuda,),) = found["ARG"]
    name, _, default = cuda.partition("=")
    extras = re.fullmatch(r'"\.\[(.+)\]"', install[-1])[1].replace(f"${name}", default)
    assert {*extras.split(","), "cuda13"} <= set(PROJECT["optional-dependencies"])


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


@pytest.mark.parametrize(
    "script, extra, given, command",
    [
        ("test", "dev", "-m slow", "-m pytest"),
        ("notebook", "notebook", "my.ipynb --pictures here", "run_notebook.py"),
    ],
)
def test_a_script_installs_an_extra_and_hands_on_arguments(checkout, script, extra, given, command):
    assert run(checkout, script, *given.split()).returncode == 0
    made = calls(checkout)
    assert any(call.endswith(f"--editable {checkout}[{extra}]") for call in made)
    assert command in made[-1]
    assert made[-1].endswith(f" {given}")


def test_the_packages_that_check_templates_have_an_environment_without_jddp(checkout):
    done = run(checkout, "venv", "templates")
    assert done.stdout == f"{checkout}/.venv-templates/bin/python\n"
    (install,) = (call for call in calls(checkout) if "pip install" in call)
    assert re.search(r" skypilot==[\d.]+$", install)
    assert str(checkout) not in install
    assert ".venv*/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_change_of_what_is_needed_or_an_install_that_failed_installs_again(checkout, monkeypatch):
    def num_installs(returncode=0):
        assert (run(checkout, "venv").returncode != 0) == bool(returncode)
        return sum("pip install" in call for call in calls(checkout))

    assert [num_installs(), num_installs()] == [1, 0]
    for changed in ("pyproject.toml", "constraints.txt"):
        (checkout / changed).write_text("changed")
        assert [num_installs(), num_installs()] == [1, 0]
    (checkout / "constraints.txt").write_text("changed again")
    monkeypatch.setenv("NO_NETWORK", "1")
    num_installs(returncode=1)
    assert run(checkout, "quickstart").returncode != 0
    assert "-m jddp.train" not in calls(checkout)
    monkeypatch.delenv("NO_NETWORK")
    assert [num_installs(), num_installs()] == [1, 0]


def test_an_environment_of_several_extras_has_each_of_them_and_what_a_run_needs(checkout):
    def num_installs(*extras):
        assert run(checkout, "venv", *extras).returncode == 0
        return sum("pip install" in call for call in calls(checkout))

    assert num_installs("dev,docs") == 1
    assert [num_installs("docs"), num_installs(), num_installs("docs,dev")] == [0, 0, 0]
    assert [num_installs("dev,peers"), num_installs("peers")] == [1, 0]


def test_without_a_new_enough_python_the_scripts_say_what_is_missing(checkout, monkeypatch):
    monkeypatch.setenv("TOO_OLD", "1")
    monkeypatch.setenv("PYENV_ROOT", "/nonexistent")
    refused = run(checkout, "quickstart")
    assert refused.returncode == 69
    assert "no Python 3.11 or newer on PATH" in refused.stderr
    assert not (checkout / ".venv").exists()


RELEASES = [
    ({"CHANGELOG.md": "## 0.2.0 (not released yet)"}, "--dry-run", "CHANGELOG.md has version 0.2"),
    ({"CHANGELOG.md": "## Unreleased"}, "--check", "CHANGELOG.md has version none and"),
    ({"CITATION.cff": 'version: "0.1.1"'}, "--check", "CITATION.cff has version 0.1.1 and"),
    ({"pyproject.toml": ""}, "--check", "has version 0.1.0 and pyproject.toml none"),
    ({}, "", "CHANGELOG.md has no date for 0.1.0"),
    ({}, "--tag", "unknown option '--tag'"),
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


def test_templates_of_issues_are_forms_that_ask_for_commands_there_are():
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [path.stem for path in templates] == ["bug", "question"]
    for path in templates:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} == set(form)
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        commands = re.findall(r"`jddp (\w+)", path.read_text())
        assert {"doctor"} <= {*commands} <= COMMANDS.keys()
        named = re.findall(r"[\w/]+\.md", path.read_text())
        assert all((ROOT / name).exists() for name in named)


def test_how_to_cite_agrees_with_the_package_and_the_version_is_the_same_in_all_files():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["license"]
    subprocess.run([ROOT / "scripts" / "release", "--check"], check=True)
