"""Prints what the time of the tests goes to: by cause, and by file.

    python benchmarks/time_by_cause.py                              scripts/test's tests
    python benchmarks/time_by_cause.py tests/engine -m slow       any arguments of pytest

Seconds are of the two workers together. Tracing, lowering and compiling are what JAX reports of
each program (compiling includes reading the compile cache); "processes" is the time spent starting
child processes and waiting for them; "the rest" is running programs, and Python. A span inside
another, as of a constant that is compiled while a step is traced, counts for itself alone. Needs
jddp[mutation].
"""

import collections
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.monitoring
import psutil
import pytest

COMPILE = "/jax/core/compile/"
EVENTS = {
    COMPILE + "jaxpr_trace_duration": "tracing",
    COMPILE + "jaxpr_to_mlir_module_duration": "lowering",
    COMPILE + "backend_compile_duration": "compiling",
}
CAUSES = ["imports", *EVENTS.values(), "processes", "the rest"]


class Spans:
    """Seconds by cause, each span of time without those inside it.

    Attributes:
      seconds: Seconds by cause since `take` was last called.
      ended: Begin and length of spans, in the order of their ends.
    """

    def __init__(self):
        self.seconds = collections.Counter[str]()
        self.ended: list[tuple[float, float]] = []

    def add(self, event: str, begin: float, end: float, **metadata: object) -> None:
        """Counts a span of the main thread."""
        if event not in {*EVENTS, *CAUSES} or threading.current_thread() != threading.main_thread():
            return
        inner = 0.0
        while self.ended and self.ended[-1][0] >= begin:
            inner += self.ended.pop()[1]
        self.ended.append((begin, end - begin))
        self.seconds[EVENTS.get(event, event)] += end - begin - inner

    def around(self, function):
        """The function, as a span of "processes"."""

        def timed(*args, **kwargs):
            begin = time.time()
            try:
                return function(*args, **kwargs)
            finally:
                self.add("processes", begin, time.time())

        return timed

    def take(self) -> dict[str, float]:
        """The seconds since this was last asked."""
        taken, self.seconds = dict(self.seconds), collections.Counter()
        return taken


class Plugin:
    """Notes the causes of each phase of a test in its worker, and adds them up in the report."""

    def __init__(self):
        self.spans = Spans()
        self.of_file = collections.defaultdict(collections.Counter)

    def pytest_collection_finish(self):
        """Counts what the process has done so far."""
        self.spans.take()
        started = psutil.Process().create_time()
        self.spans.seconds["imports"] = time.time() - started

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        """Puts the causes into a report, which goes to the main process."""
        report = yield
        report.causes = self.spans.take()
        known = sum(report.causes.values()) - report.causes.get("imports", 0)
        report.causes["the rest"] = max(call.duration - known, 0)
        return report

    def pytest_runtest_logreport(self, report):
        """Adds the causes of a report to those of its file."""
        self.of_file[report.location[0]].update(report.causes)

    def pytest_terminal_summary(self, terminalreporter):
        """Prints a line for each file."""
        rows = sorted(self.of_file.items(), key=lambda row: -row[1].total())
        total = sum((row for _, row in rows), collections.Counter())
        terminalreporter.line(f"{'seconds':45}" + "".join(f"{cause:>10}" for cause in CAUSES))
        for name, row in [("all", total), *rows]:
            shown = "".join(f"{row[cause]:10.1f}" for cause in CAUSES)
            terminalreporter.line(f"{name.removeprefix('tests/'):45}{shown}")


def pytest_configure(config: pytest.Config) -> None:
    plugin = Plugin()
    config.pluginmanager.register(plugin)
    jax.monitoring.register_event_time_span_listener(plugin.spans.add)
    for name in ("__init__", "communicate", "wait"):
        method = getattr(subprocess.Popen, name)
        setattr(subprocess.Popen, name, plugin.spans.around(method))


def main() -> int:
    options = ["-q", "-p", Path(__file__).stem, "-n", "2", "--dist", "worksteal"]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", *options, *sys.argv[1:]]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
