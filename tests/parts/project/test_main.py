"""`jddp` lists its commands, and runs the one that is named first."""

import subprocess
import sys
import tomllib

import pytest
from house import MODULES, PACKAGE, name_of

from jddp.__main__ import COMMANDS, main


def commands(*arguments):
    command = [sys.executable, "-m", "jddp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments, code", [([], 2), (["train.num_steps=1"], 2), (["--help"], 0), (["-h"], 0)]
)
def test_it_prints_the_commands_and_trains_nothing(arguments, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = commands(*arguments)
    assert done.returncode == code, done.stderr
    assert "jddp train" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.count("\n") < 24
    assert not list(tmp_path.iterdir())


def test_every_command_of_the_package_is_named():
    doors = {
        name_of(path).removesuffix(".__main__")
        for path in MODULES
        if 'if __name__ == "__main__"' in path.read_text()
        and {"distributed", "launcher"}.isdisjoint(path.relative_to(PACKAGE).parts)
    } - {"jddp"}
    assert {f"jddp.{name}" for name in COMMANDS} == doors


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_run_as_its_module_is(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"python -m jddp.{name}" in capsys.readouterr().out


def test_the_list_imports_no_library():
    program = (
        "import sys, jddp.__main__ as x; x.main([]); assert not {'jax', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_console_script_is_the_same(capsys):
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jddp": f"jddp.__main__:{main.__name__}"}
    assert main(["evalute"]) == 2
    assert "no command 'evalute'" in capsys.readouterr().err
