"""Prints the share of the lines of each room that the tests run.

    python benchmarks/coverage_by_room.py                              scripts/test's tests
    python benchmarks/coverage_by_room.py tests/engine -m slow       any arguments of pytest

Needs jddp[mutation]. Lines of other processes, which tests start, are not seen.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "coverage.json"
        options = ["--cov=jddp", f"--cov-report=json:{report}", "-n", "2", "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-q", *options, *sys.argv[1:]]
        done = subprocess.run(command, env={**os.environ, "COVERAGE_FILE": f"{name}/coverage"})
        files = json.loads(report.read_text())["files"]
    lines, run = collections.Counter[str](), collections.Counter[str]()
    for path, found in files.items():
        room = Path(path).with_suffix("").parts[1]
        lines[room] += found["summary"]["num_statements"]
        run[room] += found["summary"]["covered_lines"]
    for room in sorted(filter(lines.get, lines)):
        print(f"{room:16} {run[room]:6} of {lines[room]:6} lines {run[room] / lines[room]:7.1%}")
    total = lines.total(), run.total()
    print(f"{'all':16} {total[1]:6} of {total[0]:6} lines {total[1] / total[0]:7.1%}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
