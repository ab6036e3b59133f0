"""Writes the files of `stored/` from the checkout that is imported.

cd tests
PYTHONPATH=..:. python -m golden.write programs orders surface
unshare --uts sh -c "hostname host; PYTHONPATH=..:. python -m golden.write runs"
"""

import json
import runpy
import sys
import tempfile
import zipfile
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))  # devices as the tests have them

from golden import orders, programs, resumed  # noqa: E402
from golden.test_golden import STORED, surface  # noqa: E402

# Not what a run resumes from: earlier checkpoints, and what people read.
LEFT_OUT = {"3", "events", "lock", "logs", "report.html"}


def write(name, values):
    (STORED / f"{name}.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def write_programs():
    cases = [*programs.SINGLES, *programs.PAIRS]
    write("programs", {", ".join(case): programs.program(*case) for case in cases})


def write_orders():
    found = {name: orders.rows(name, 1) for name in orders.ORDERS}
    with tempfile.TemporaryDirectory() as folder:
        for name in orders.SOURCES:
            (Path(folder) / name).mkdir()
            found[name] = orders.source(name, Path(folder) / name)
    write("orders", {**found, "evaluation": orders.evaluated(1)})


def write_surface():
    write("surface", surface())


def write_runs():
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(STORED / "runs.zip", "w", zipfile.ZIP_DEFLATED) as stored,
    ):
        for name in resumed.RUNS:
            run_dir = Path(folder) / name
            resumed.train_by_all(name, run_dir, resumed.HALF)
            for path in sorted(run_dir.rglob("*")):
                if path.is_file() and not LEFT_OUT & {*path.relative_to(run_dir).parts}:
                    stored.write(path, path.relative_to(folder))
            found[name] = resumed.losses_after(
                resumed.train_by_all(name, run_dir, resumed.WHOLE), resumed.HALF
            )
    write("runs", found)


if __name__ == "__main__":
    STORED.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        globals()[f"write_{name}"]()
