"""Sinks: objects that take the records of a run, such as the metrics file or TensorBoard.

    choose_sinks(["tensorboard", "my_sinks:Lines"], key="report.sinks")

A word is found by the entry points `jddp.sinks`; `package.module:Name` or an object is your own. A
package that only a sink needs is looked for here, before training, and imported in its thread.
Whatever a sink does, it neither stops nor slows the training:

    guarded = GuardedSink("wandb", make)
    guarded.begin(start)          # a thread makes the sink
    guarded.log(record)           # never waits
    guarded.close()               # waits for half a minute at most
"""

import contextlib
import copy
import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jddp.ground.errors import ConfigError
from jddp.ground.names import SINKS, added, did_you_mean, name_of_callable, resolve_target
from jddp.ground.typing import Record, Settings

MOST_WAITING = 1000  # Number of records that wait; further ones are lost.
SECONDS_TO_CLOSE = 30.0  # Limit for taking the waiting records and closing.
log = logging.getLogger("jddp")


@runtime_checkable
class Sink(Protocol):
    """Takes the records of a run, on process 0."""

    def log(self, record: Record) -> None:
        """Takes a record.

        Args:
          record: Values by name: numbers, and lists (of lists) of numbers for metrics that are
            arrays; from `run.log` also text, and numpy arrays of float32, or of uint8 for images.
            "step" is the number of finished steps. "split" is "train" for the last step before the
            record, "eval" for an evaluation, or "callback".
        """

    def close(self) -> None:
        """Writes the rest; called once, after the last record, also if training has failed."""


class Start(NamedTuple):
    """A start of a run, the argument with which a sink is made.

    Attributes:
      run_dir: Run directory, or None.
      config: Config of the run; {} for a run of `fit`.
      step: Number of finished steps; 0 unless the run resumes.
    """

    run_dir: Path | None
    config: Settings
    step: int


# A word, a target, a sink, or a class or function that makes one.
GivenSink = str | Sink | Callable[[Start], Sink]


class ChosenSink(NamedTuple):
    """A sink that a run will make.

    Attributes:
      name: Word or target that names it, or the name of its class.
      make: Function that makes it.
      needs_folder: Whether it writes into the run directory.
    """

    name: str
    make: Callable[[Start], Sink]
    needs_folder: bool = False


def choose_sinks(given: object, *, key: str) -> list[ChosenSink]:
    """Returns the sinks that are named or given; imports the modules of targets.

    Args:
      given: A list of words, targets, sinks, and classes or functions that make one.
      key: The config key or argument that holds them, for errors.

    Raises:
      ConfigError: If a name is unknown, a package is not installed, or an object is no sink.
    """
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{key} is a list of sinks, such as ['tensorboard']; got {given!r}.")
    return [_choose(sink, f"{key}[{number}]") for number, sink in enumerate(given)]


def _choose(given: object, key: str) -> ChosenSink:
    if not isinstance(given, str):
        return _of_object(name_of_callable(given), given, key)
    if ":" in given:
        return _of_object(given, resolve_target(given, key=key), key)
    words = dict(added(SINKS))
    if given not in words:
        known = f"Known: {', '.join(words)}; your own is package.module:Name."
        raise ConfigError(f"{key}: no sink {given!r}.{did_you_mean(given, words.keys())} {known}")
    package = vars(words[given])["package"]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key}: {given} needs {package}, which is not installed: pip install 'jddp[{given}]'."
        )
    return ChosenSink(given, words[given], needs_folder=True)


def _of_object(name: str, found: Any, key: str) -> ChosenSink:
    missing = [method for method in ("log", "close") if not callable(getattr(found, method, None))]
    is_class = isinstance(found, type)
    if missing and (is_class or not callable(found)):
        raise ConfigError(
            f"{key}: {name} has no method {missing[0]!r}. A sink has log(record) and close()."
        )
    return ChosenSink(name, found if is_class or missing else lambda _: found)


class GuardedSink:
    """A sink that passes records to another sink, in a thread.

    The other sink may fail, be slow, or hang, for example because its network is down. Its first
    failure is reported in one line, and at the end the number of records that it has lost.

    Args:
      name: Name of the other sink, for its failures.
      make: Function that makes it.
    """

    def __init__(self, name: str, make: Callable[[Start], Sink]) -> None:
        self._name, self._make = name, make
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None is the end
        self._num_given = self._num_taken = 0
        self._is_reported = False
        self._thread: threading.Thread | None = None

    def begin(self, start: Start) -> None:
        """Begins to make the sink, and to pass records to it."""
        self._thread = threading.Thread(target=self._take_records, args=(start,), daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Passes a record on, unless too many wait already."""
        self._num_given += 1
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(record)
        else:
            self._report(f"takes no record, and {MOST_WAITING:,} wait")

    def close(self) -> None:
        """Waits for the sink to close, for a limited time; reports the records that are lost."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(SECONDS_TO_CLOSE)
        if self._thread.is_alive():
            self._report(f"has not closed within {SECONDS_TO_CLOSE:g} s")
        if num_lost := self._num_given - self._num_taken:
            log.warning("sink %s: %d of %d records lost", self._name, num_lost, self._num_given)

    def _take_records(self, start: Start) -> None:
        with self._reporting("begin"):
            sink = self._make(start)
            while (record := self._waiting.get()) is not None:
                with self._reporting(f"take the record of step {record['step']}"):
                    sink.log(copy.deepcopy(record))  # The sink may change it.
                    self._num_taken += 1
            with self._reporting("close"):
                sink.close()

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # An exit, too: it would end the thread in silence.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._report(f"cannot {what}: {reason.rstrip('.')}")

    def _report(self, what: str) -> None:
        """Reports the first failure."""
        if not self._is_reported:
            self._is_reported = True
            log.warning("sink %s %s. The training continues.", self._name, what)
