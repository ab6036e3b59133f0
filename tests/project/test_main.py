"""`jddp` lists its commands, and runs the one that is named first."""

import re
import subprocess
import sys
import tomllib

import pytest
from house import PACKAGE

import jddp
from jddp.__main__ import COMMANDS, SHARED, WORKBENCH, main
from jddp.ground import errors


@pytest.mark.parametrize("arguments, code", [("", 2), ("train.num_steps=1", 2), ("--help -h", 0)])
def test_it_prints_the_commands_and_trains_nothing(arguments, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for argument in arguments.split() or [None]:
        assert main([argument] if argument else []) == code
        lines = capsys.readouterr().out.splitlines()
        assert "jddp train" in "\n".join(lines)
        assert max(map(len, lines)) <= 80
        assert len(lines) < 24
    assert not list(tmp_path.iterdir())


def test_the_module_is_run_and_its_list_imports_no_library():
    command = [sys.executable, "-X", "importtime", "-m", "jddp", "-h"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "jddp train" in shown.stdout
    assert re.findall(r"\| +(jddp|jax|numpy)$", shown.stderr, re.M) == ["jddp"]


def test_it_prints_the_version_and_those_of_what_results_depend_on(capsys):
    assert main(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split() == ["jddp", jddp.__version__]
    assert {"python", "jax", "flax", "optax"} <= {line.split()[0] for line in others}


def test_every_command_of_the_package_is_named_and_the_console_script_is_the_same(capsys):
    paths = (PACKAGE / "commands").glob("*.py")
    files = {path.stem for path in paths if "def main(" in path.read_text()}
    assert files | SHARED.keys() == COMMANDS.keys() - WORKBENCH
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jddp": f"jddp.__main__:{main.__name__}"}
    assert main(["evalute"]) == 2
    assert "no command 'evalute'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_run_as_its_module_is_and_its_help_fits_a_terminal(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert f"jddp {name}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_an_error_ends_with_one_of_the_exit_codes_and_each_is_printed_as_its_number():
    kinds = [x for x in vars(errors).values() if isinstance(x, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.Error)}
    assert codes <= set(errors.ExitCode)
    for code in errors.ExitCode:
        assert f"{code}" == str(code) == str(int(code))  # in words that the launcher reads again
