"""A ceiling of scripts/sizes.py only falls."""

import subprocess

import ceilings
import pytest
from ceilings import Figure


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "ceilings.toml"
    ceilings.write({"lines": 95, "names": 9, "not counted": 1}, file)
    return file


def commit(file):
    name = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=file.parent, check=True)


def test_a_raise_beyond_the_allowance_of_issue_y_is_refused():
    name = "code lines of the core"
    for ceiling, wrong in ((1700, []), (1701, [f"{name} (1701, was 1000)"])):
        assert ceilings.raised({name: ceiling}, {name: 1000}, [Figure(name, 1000, 8)]) == wrong


@pytest.mark.parametrize("later", [{"lines": 90, "names": 10}, {"lines": 90}])
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_ceiling_falls_with_its_figure_and_is_never_raised_or_dropped(file, later, is_committed):
    figures = [Figure("lines", 90, 80), Figure("names", 9, 8)]
    commit(file)
    assert ceilings.hold([Figure("names", 10, 8)], lower=True, file=file) == 1
    assert ceilings.hold(figures, lower=False, file=file) == 0
    assert ceilings.read(file) == {"lines": 95, "names": 9, "not counted": 1}
    assert ceilings.hold(figures, lower=True, file=file) == 0
    assert ceilings.read(file) == {"lines": 90, "names": 9, "not counted": 1}
    ceilings.write(later, file)
    if is_committed:
        commit(file)
        commit(file)  # of something else
    assert ceilings.hold(figures, lower=True, file=file) == 1
    assert ceilings.read(file) == later
