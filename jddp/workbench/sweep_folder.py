"""The folder of a sweep: a run for each point, and notes of the runs that have finished.

    folder = SweepFolder(Path("runs/mine"), ["a.yaml"], ["train.num_steps=20"])
    codes = folder.train(Sweep.parse(["seed=0,1,2"]))    # {"seed=0": 0, "seed=1": 0, "seed=2": 0}

Each run is `jddp train` in a process of its own: what it compiles, allocates and breaks ends with
it. A run is resumed as any other; one that has finished with the same config is left out.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jddp.config.files import dump_values, load_config
from jddp.errors import ExitCode, file_errors, report
from jddp.files import replace_file
from jddp.workbench.in_turn import InTurn
from jddp.workbench.results import is_run
from jddp.workbench.sweep import Point, Sweep

NOTES = "sweep.json"  # digests of the configs of the runs that have finished, by their names
# Exit codes of a run that a signal has stopped, which stops the sweep, too.
STOPPED = {ExitCode.PREEMPTED, ExitCode.INTERRUPTED}


@dataclasses.dataclass(frozen=True)
class SweepFolder:
    """The runs of a sweep.

    Attributes:
      path: The folder.
      files: Config files, and names of presets.
      overrides: Keys and values of all runs, `key.path=value`.
    """

    path: Path
    files: Sequence[str]
    overrides: Sequence[str]

    def arguments(self, point: Point) -> list[str]:
        """The arguments of `jddp train` for the run of a point."""
        files = [word for file in self.files for word in ("--config", file)]
        return [*files, *self._overrides(point)]

    def train(self, sweep: Sweep) -> dict[str, int]:
        """Trains the points that have not finished, one after the other, until a signal comes.

        Returns:
          The exit code of each run that was begun, by its name. A signal that comes between two
          runs counts as the end of the next one.

        Raises:
          FileSystemError: If the folder cannot be written.
        """
        codes = dict[str, int]()
        with InTurn() as turns:
            for number, point in enumerate(sweep.points(), 1):
                about = f"run {number:,} of {sweep.num_points:,}: {point.name}"
                if self._has_finished(point):
                    report(f"{about} has finished")
                    continue
                report(about)
                codes[point.name] = self._train(point, turns)
                if codes[point.name] in STOPPED:
                    break
        return codes

    def _train(self, point: Point, turns: InTurn) -> int:
        code = turns.run([sys.executable, "-m", "jddp.train", *self.arguments(point)])
        if code == ExitCode.DONE:
            notes = {**self._notes(), point.name: self._digest(point)}
            with file_errors(f"{self.path} cannot be written"):
                replace_file(self.path / NOTES, json.dumps(notes, indent=2).encode())
        else:
            report(f"{point.name}: exit code {code}")
        return code

    def _has_finished(self, point: Point) -> bool:
        noted = self._notes().get(point.name)
        return is_run(self.path / point.name) and noted == self._digest(point)

    def _notes(self) -> dict[str, str]:
        try:
            found = json.loads((self.path / NOTES).read_bytes())
        except (OSError, ValueError):
            return {}  # Each run finds for itself that nothing is left to do.
        return found if isinstance(found, dict) else {}

    def _digest(self, point: Point) -> str:
        config, _ = load_config(self.files, self._overrides(point))
        return hashlib.sha256(dump_values(config.model_dump()).encode()).hexdigest()

    def _overrides(self, point: Point) -> list[str]:
        given = [x for x in (*self.overrides, *point.overrides) if not x.startswith("run.dir=")]
        return [*given, f"run.dir={self.path / point.name}"]
