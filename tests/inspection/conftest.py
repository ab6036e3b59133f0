"""A program `nvidia-smi` that tests install."""

import os
import sys

import pytest


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs an `nvidia-smi` that prints these texts, by the beginning of its argument."""

    def make(answers, code=0):
        program = tmp_path / "nvidia-smi"
        lines = [f"#!{sys.executable}", "import sys", f"answers = {answers!r}"]
        lines += ["given = sys.argv[1].partition('=')[0]", "print(end=answers.get(given, ''))"]
        program.write_text("\n".join([*lines, f"sys.exit({code})"]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make
