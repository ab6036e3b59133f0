"""Tries jddp on versions of Python and JAX, and writes what worked into docs/versions.md.

    python scripts/versions.py                each pair that can be installed here, minutes each
    python scripts/versions.py 3.11 0.8.1     one pair

A pair gets an environment of its own, which is removed. Three things are tried there: all public
names are imported, the default job trains 20 steps, and the contract tests pass: what is public is
the stored list, stored runs resume, and strategies equal one device. `scripts/venv release` has uv.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOWEST = re.search(r'"jax>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
JAX = (LOWEST, "0.10.2", "0.11.2", "newest")
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")  # columns of the table
TOOLS = ("pytest>=9.1,<9.2", "pytest-xdist>=3.8", "griffelib>=2.4", "hypothesis>=6.170")
TOOLS += ("pillow>=12", "datasets>=4")
NAMES = "import jddp; [getattr(jddp, name) for name in jddp.__all__]"
# Programs, and the text of annotations, differ between versions of JAX and pydantic.
NOT_OF_A_VERSION = "not program and not rows and not changelog"
TESTS = (
    "tests/golden",
    "tests/engine/test_against_one_device.py",
    "-k",
    NOT_OF_A_VERSION,
)
ROW = re.compile(r"^\| (3\.\d+) \| ([\d.]+) \|.*\n", re.M)


def main(pairs: list[tuple[str, str]]) -> int:
    """Tries pairs, and writes the row of each; returns how many failed."""
    num_failed = 0
    for python, jax in pairs:
        with tempfile.TemporaryDirectory() as folder:
            if (row := try_pair(python, jax, Path(folder))) is None:
                continue
        print(row, flush=True)
        num_failed += "failed" in row
        write(row)
    return num_failed


def try_pair(python: str, jax: str, folder: Path) -> str | None:
    """The row of a pair; None where its Python is not here, or JAX has no version for it."""
    tools = Path(run(["scripts/venv", "release"]).stdout.strip()).parent
    environment = folder / "venv"
    if (interpreter := find_python(python)) is None:
        return None
    made = run([tools / "uv", "venv", "-q", "-p", interpreter, environment])
    wanted = [f"jax=={jax}"] * (jax != "newest")
    way = ["--resolution", "lowest-direct"] * (jax == LOWEST)
    install = [tools / "uv", "pip", "install", "-q", "--python", environment, *way]
    if made.returncode or run([*install, "--editable", ROOT, *TOOLS, *wanted]).returncode:
        return None
    ours = environment / "bin" / "python"
    listed = json.loads(run([tools / "uv", "pip", "list", "--format", "json", "-p", ours]).stdout)
    versions = {entry["name"]: entry["version"] for entry in listed}
    train = ["-m", "jddp.train", "train.num_steps=20", f"run.dir={folder / 'run'}"]
    tried = (["-c", NAMES], train, ["-m", "pytest", "-q", "-n", "0", *TESTS])
    results = [judged(run([ours, *arguments])) for arguments in tried]
    today = datetime.date.today().isoformat()
    cells = [python, *(versions[name] for name in PACKAGES), *results, today]
    return f"| {' | '.join(cells)} |\n"


def find_python(version: str) -> str | None:
    """The path of an interpreter on PATH or under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    return next(iter(found), None) or shutil.which(f"python{version}")


def run(command: list) -> subprocess.CompletedProcess:
    """Runs a command in the checkout, without the packages of another environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def judged(done: subprocess.CompletedProcess) -> str:
    """The cell of a command that has ended."""
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        return "failed"
    return "ok"


def write(row: str) -> None:
    """Puts a row into the table of the page, in the place of an older row of the pair."""
    text = PAGE.read_text()
    rows = {pair.group(1, 2): pair[0] for pair in ROW.finditer(text)}
    head = re.search(r"^\| Python .*\n\|[ -|]+\n", text, re.M)[0]
    rows[ROW.match(row).group(1, 2)] = row
    ordered = sorted(rows, key=lambda pair: [[int(x) for x in v.split(".")] for v in pair])
    before, _, after = ROW.sub("", text).partition(head)
    PAGE.write_text(before + head + "".join(rows[pair] for pair in ordered) + after)


if __name__ == "__main__":
    chosen = [(python, jax) for python in PYTHONS for jax in JAX]
    sys.exit(main([(sys.argv[1], sys.argv[2])] if sys.argv[2:] else chosen))
