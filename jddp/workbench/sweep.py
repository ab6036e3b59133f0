"""`jddp train --sweep key=value,value ...`: trains each point of a sweep, and compares the runs.

    sweep = Sweep.parse(["seed=0,1,2", "optimizer.learning_rate=1e-3,3e-3", "train.num_steps=20"])
    [point.name for point in sweep.points()]  # ["seed=0,learning_rate=1e-3", ...], 6 names

A sweep is the product of the values that keys are given. A key with one value changes all points
and is no part of their names. Each run is `jddp train` in a process of its own: its programs,
memory and failures end with it. A run that has finished finds that nothing is left to do.
"""

import argparse
import hashlib
import itertools
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from jddp.config.files import load_config
from jddp.distributed.identity import resolve_identity
from jddp.distributed.signals import Hearing
from jddp.ground.errors import ConfigError, Error, ExitCode, UsageError, report, show
from jddp.ground.files import expand
from jddp.ground.names import few
from jddp.workbench.compare import compare_runs, is_run, read_runs

LONGEST = 40  # Maximum number of characters of a value in a name.
# Exit codes of a run that a signal has stopped, which stops the sweep, too.
STOPPED = {ExitCode.PREEMPTED, ExitCode.INTERRUPTED}


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
      name: Name of its directory.
      overrides: The keys and values of all that the sweep gives, `key.path=value`.
    """

    name: str
    overrides: tuple[str, ...]

    def words(self, folder: Path) -> list[str]:
        """The arguments of `jddp train` for this run, in a folder of all runs."""
        own = [x for x in self.overrides if not x.startswith("run.dir=")]
        return [*own, f"run.dir={folder / self.name}"]


@dataclass(frozen=True)
class Sweep:
    """Keys of a config, and the values that each takes.

    Attributes:
      values: Values by key, as they were typed.
    """

    values: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Sweep":
        """Reads `key.path=value,value`; a comma in brackets or quotes is a part of a value.

        Raises:
          ConfigError: If a word has another form, or the directory of the runs is varied.
        """
        values = dict(map(_key_and_values, words))
        if len(values.get("run.dir", ())) > 1:
            raise ConfigError("--sweep run.dir: it is the folder of all runs. Give one value.")
        return cls(values)

    @property
    def num_points(self) -> int:
        """Number of runs."""
        return math.prod(map(len, self.values.values()))

    def points(self) -> Iterator[Point]:
        """All points; the values of the last key change first."""
        return (self._point(chosen) for chosen in itertools.product(*self.values.values()))

    def samples(self) -> Iterator[Point]:
        """A few points, in which each value occurs: as many mistakes as the product has."""
        first = [values[0] for values in self.values.values()]
        yield self._point(first)
        for i, values in enumerate(self.values.values()):
            for value in values[1:]:
                yield self._point([*first[:i], value, *first[i + 1 :]])

    def _point(self, chosen: Sequence[str]) -> Point:
        keys = [*self.values]
        varied = [(k, x) for k, x in zip(keys, chosen, strict=True) if len(self.values[k]) > 1]
        name = ",".join(f"{self._short(key)}={_label(value)}" for key, value in varied)
        overrides = (f"{key}={value}" for key, value in zip(keys, chosen, strict=True))
        return Point(name or "run", tuple(overrides))

    def _short(self, key: str) -> str:
        """The last part of a key, if no other key ends in it."""
        last = key.rpartition(".")[2]
        return last if sum(x.rpartition(".")[2] == last for x in self.values) == 1 else key


def _key_and_values(word: str) -> tuple[str, tuple[str, ...]]:
    key, equals, text = word.partition("=")
    values = _split(text)
    if not (key and equals and values):
        raise ConfigError(
            f"--sweep {word!r}: not of the form key.path=value,value, e.g. seed=0,1,2. Quote a "
            "value that has a comma or a brace of its own."
        )
    return key, tuple(dict.fromkeys(values))


def _split(text: str) -> list[str]:
    """The values of a list in YAML, as they stand there; none if it cannot be read."""
    listed = f"[{text}]"
    try:
        node = yaml.compose(listed, yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(listed):
        return []
    return [listed[x.start_mark.index : x.end_mark.index] for x in node.value]


def _label(value: str) -> str:
    """A value as a part of a file name; with a digest, if that changes or shortens it."""
    label = re.sub(r"[^\w.+-]+", "_", value).strip("_")[:LONGEST]
    return label if label == value else f"{label}-{hashlib.sha256(value.encode()).hexdigest()[:6]}"


def run_sweep(arguments: argparse.Namespace) -> int:
    """Trains the runs of `jddp train --sweep`; returns the exit code of the first failure.

    Raises:
      ConfigError: If a key or a value is wrong, before the first run.
      UsageError: If this is one of several processes.
    """
    if arguments.find_rate:
        raise UsageError("--sweep and --find-rate exclude each other. Find the rate first.")
    _refuse_job()
    sweep = Sweep.parse(arguments.sweep)
    files, overrides = arguments.config, arguments.overrides
    samples = (load_config(files, [*overrides, *x.overrides])[0] for x in sweep.samples())
    folder = expand(next(samples).run.dir or "")
    if is_run(folder):
        raise UsageError(
            f"run.dir {folder} holds a run. Give the runs of a sweep a folder of their own, "
            f"such as run.dir={folder}-sweep."
        )
    shared = [word for file in files for word in ("--config", file)]
    shared += [x for x in overrides if not x.startswith("run.dir=")]
    commands = ((point.name, [*shared, *point.words(folder)]) for point in sweep.points())
    if arguments.dry_run:
        for _, words in commands:
            show(shlex.join(["jddp", "train", *words]))
        return ExitCode.DONE
    for _ in samples:
        pass  # Each has been checked.
    codes = _train(commands, sweep.num_points)
    _compare([folder / point.name for point in sweep.points()])
    return _conclude(codes, sweep.num_points)


def _train(commands: Iterator[tuple[str, list[str]]], num_runs: int) -> dict[str, int]:
    """Trains runs one after the other, until a signal comes; returns their exit codes.

    A signal that comes between two runs counts as the end of the next one.
    """
    codes = dict[str, int]()
    with (turns := InTurn()):
        for number, (name, words) in enumerate(commands, 1):
            report(f"run {number:,} of {num_runs:,}: {name}")
            codes[name] = turns.run([sys.executable, "-m", "jddp.train", *words])
            if codes[name] != ExitCode.DONE:
                report(f"{name}: exit code {codes[name]}")
            if codes[name] in STOPPED:
                break
    return codes


def _refuse_job() -> None:
    """Refuses to start the runs in each of several processes."""
    num = resolve_identity().num_processes
    if num > 1:
        raise UsageError(
            f"--sweep starts each run itself, and this is one of {num} processes. --sweep ... "
            "--dry-run lists the commands: launch one after the other, then jddp compare RUN.DIR."
        )


def _compare(runs: Sequence[Path]) -> None:
    try:
        show(f"\n{compare_runs(read_runs([*filter(is_run, runs)]))}")
    except Error as error:  # Runs may have failed before an evaluation.
        report(error.in_shell)


def _conclude(codes: dict[str, int], num_runs: int) -> int:
    failed = {name: code for name, code in codes.items() if code != ExitCode.DONE}
    if not failed:
        return ExitCode.DONE
    last, code = [*failed.items()][-1]
    if code in STOPPED:
        report(f"stopped at {last}. The same command resumes.")
        return code
    names = few([f"{name} (exit code {code})" for name, code in failed.items()])
    report(
        f"{len(failed)} of {num_runs:,} runs failed: {names}. The same command tries them again."
    )
    return next(iter(failed.values()))


class InTurn(Hearing):
    """While open, in the main thread, passes the first stop signal on to the command that runs.

    The processes stay in the session of this one, so the terminal sends Ctrl-C to both; a second
    signal within a moment is a repeat for jddp.

    After it no command is begun. A second signal, later than a moment, ends this process at once.
    """

    def __init__(self) -> None:
        super().__init__(self._pass_on)
        self._stopped_by: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        """Runs a command to its end.

        Returns:
          Its exit code, or 128 plus the number of a signal that ended it; `ExitCode.PREEMPTED`, if
          a stop signal has come before.
        """
        if self._stopped_by is not None:
            return ExitCode.PREEMPTED
        with subprocess.Popen(command) as self._process:
            if self._stopped_by is not None:  # A signal came before the process.
                self._process.send_signal(self._stopped_by)
            code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int) -> None:
        self._stopped_by = number
        if self._process is not None:
            self._process.send_signal(number)  # Nothing is sent if it has ended.
