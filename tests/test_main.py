"""`python -m jddp` names what can be run, and runs none of it."""

import re
import subprocess
import sys

import pytest
from test_layers import MODULES, name_of


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
    assert "python -m jddp.train" in done.stdout
    assert not list(tmp_path.iterdir())


def test_every_command_of_the_package_is_named():
    doors = {
        name_of(path).removesuffix(".__main__")
        for path in MODULES
        if 'if __name__ == "__main__"' in path.read_text()
        and {"distributed", "launcher"}.isdisjoint(path.parts)
    } - {"jddp"}
    assert set(re.findall(r"python -m (jddp\.\w+)", commands().stdout)) == doors
