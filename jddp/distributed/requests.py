"""Makes all processes of a job follow a request of one of them, such as a stop, at the same place.

    with Requests() as requests:
        requests.ask(Request("save", "best"))  # one process or all call it, in any thread
        for request in requests.due():     # every process calls it equally often, at equal places
            ...

A process with a request publishes the number of its next call of `due` through the coordination
service. Each process answers with this number, or with the number of its own next call if that is
larger. All act at the call with the largest number, and exchange their requests there; if all
processes are at the same call, it is the next one. Nothing is sent before a process has a request.

A stop signal is a request, too. A second signal ends a process at once, unless it comes within two
seconds: then it only repeats the first. In a notebook, whose kernel continues, it raises
`KeyboardInterrupt`.
"""

import contextlib
import itertools
import json
import signal
import threading
from collections.abc import Iterable
from typing import Literal, NamedTuple

from jddp.distributed import coordination as service
from jddp.distributed.coordination import awaiting
from jddp.distributed.exits import process, write_line
from jddp.distributed.signals import Hearing, leave_early

_ANSWER_SECONDS = 30.0  # Limit for the threads of all processes to answer.
_DAY = 86_400.0  # No limit: the watchdog, or the end of another process, ends the wait.
_LAST_SECONDS = 600.0  # Limit from the end of the first process to the end of the last.
_openings = itertools.count()


class Request(NamedTuple):
    """A request that all processes of a job follow.

    Attributes:
      kind: A save, a save in memory, a stop, or the stop that a signal asks for.
      value: The folder of a save, the reason of a stop, or the name of a signal.
    """

    kind: Literal["save", "memory", "stop", "signal"]
    value: str = ""


class Requests:
    """Lets processes agree on a place for each request or signal, while open.

    Attributes:
      is_open: Whether all processes call `due`.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._key = f"jddp/requests/{next(_openings)}"
        self._num_calls = self._num_rounds = 0
        self._asked = list[Request]()  # Requests of this process that are not done yet.
        self._at: int | None = None  # The call at which all act.
        self._changed = threading.Condition()
        self._open = contextlib.ExitStack()

    def ask(self, request: Request) -> None:
        """Requests that all processes do something at one of their next calls of `due`."""
        with self._changed:
            self._asked.append(request)
            self._propose()

    def due(self) -> list[Request]:
        """The requests to do here, in the order of the processes; the same on all of them."""
        with self._changed:
            if self._asked:
                with awaiting(set(range(service.num_processes())) - {service.process_index()}):
                    while self._at is None and service.is_connected():
                        self._changed.wait(1.0)
            self._num_calls += 1
            if self._at is None or self._num_calls < self._at:
                return []
            mine = json.dumps(self._asked)
            self._asked = []
        of_all = service.gather(f"{self._round}/asked", mine, timeout_seconds=_DAY)
        with self._changed:
            self._at = None
            self._num_rounds += 1
            if self._asked:  # Another thread has asked meanwhile.
                self._propose()
            self._changed.notify_all()
        return _in_order(of_all)

    def last(self) -> list[Request]:
        """The requests that are left, at the ends of all processes."""
        with self._changed:
            mine = json.dumps(self._asked)
            self._asked = []
        of_all = service.gather(f"{self._key}/last", mine, timeout_seconds=_LAST_SECONDS)
        return _in_order(of_all)

    def __enter__(self) -> "Requests":
        """Handles the signals, if this is the main thread, and listens to the others."""
        if service.num_processes() > 1:
            self._open.enter_context(service.background(self._listen))
        if threading.current_thread() is threading.main_thread():
            self._open.enter_context(Hearing(self._hear))
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the handlers."""
        self.is_open = False
        self._open.close()

    @property
    def _round(self) -> str:
        return f"{self._key}/{self._num_rounds}"

    def _propose(self) -> None:
        if self._at is None and service.num_processes() == 1:
            self._at = self._num_calls + 1
        elif self._at is None:
            service.try_publish(self._round, str(self._num_calls + 1))

    def _hear(self, number: int) -> None:
        if process.is_early:
            leave_early(number)
        name = signal.Signals(number).name
        again = "press Ctrl-C" if name == "SIGINT" else f"send {name}"
        write_line(f"{name}: finishing this step, then stopping; {again} again to quit now")
        self.ask(Request("signal", name))

    def _listen(self) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._at is None, 1.0):
                return False
            name = self._round
        if (proposed := service.try_read(name, 1.0)) is None:
            return not service.is_connected()
        with self._changed:
            mine = str(max(int(proposed), self._num_calls + 1))
            calls = service.gather(f"{name}/calls", mine, timeout_seconds=_ANSWER_SECONDS)
            self._at = max(map(int, calls))
            self._changed.notify_all()
        return False


def _in_order(asked: Iterable[str]) -> list[Request]:
    return list(dict.fromkeys(Request(*x) for text in asked for x in json.loads(text)))
