"""Member 0's end of a roll call: it listens, and tells all what each has said."""

import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from jddp.distributed.rendezvous import (
    LONGEST,
    POLL_SECONDS,
    SILENCE_SECONDS,
    SLACK,
    Condition,
    Member,
    Said,
    always,
    goodbye,
    introduced,
    keep_alive,
    line_of,
)
from jddp.errors import CoordinatorError, Error, ProcessMismatchError

_SHOWN = 8  # numbers of those who are missing


class Roll:
    """Member 0's end.

    Args:
      kind: What members are called: "process" or "node".
      address: host:port, as the others know it.
      listens: host:port to listen on, if that is another.
      silence_seconds: After which a member is lost.

    Raises:
      CoordinatorError: If the port is taken, or the address is not one of this machine.
    """

    def __init__(
        self,
        kind: str,
        address: str,
        listens: str | None = None,
        *,
        silence_seconds: int = SILENCE_SECONDS,
    ):
        self._kind, self._address, self._silence_seconds = kind, address, silence_seconds
        self._lines: dict[socket.socket, bytes] = {}  # of each caller, as far as it has come
        self._members: dict[socket.socket, Member] = {}  # who have said all, and wait
        self._present: dict[socket.socket, Member] = {}  # who took part in the last round
        self._lost: list[int] = []  # of them
        self._num_rounds = 0
        self._server = listen(listens or address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def __enter__(self) -> "Roll":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up."""
        self._stop_listening()
        for caller in list(self._lines):
            self._forget(caller)
        self._selector.close()

    def gather(
        self,
        mine: Member,
        *,
        seconds: float,
        is_wanted: Condition = always,
        is_enough: Callable[[Said], bool] | None = None,
        patience_seconds: float = 0.0,
        is_last: bool = False,
    ) -> Said | None:
        """What all members say, by their numbers.

        Args:
          mine: Of member 0.
          seconds: To wait for all.
          is_wanted: Asked again and again; nobody is waited for when it says no.
          is_enough: Whether those who have come would do without the others.
          patience_seconds: For which the others are waited for all the same; not for those who were
            here in an earlier round, and have gone.
          is_last: Whether to listen no more before anybody is answered: the port is free then.

        Returns:
          None if it is wanted no more.

        Raises:
          CoordinatorError: If not all have come; the others get it too.
          ProcessMismatchError: If two have the same number, or other settings; likewise.
        """
        until, enough_since = time.monotonic() + seconds, None
        while is_wanted():
            members = [mine, *self._members.values()]
            self._refuse(_mistake(self._kind, members))
            said = {member.number: member.says for member in members}
            if len(said) == mine.count:
                return self._answer(said, is_last)
            now = time.monotonic()
            if is_enough is not None and is_enough(said):
                enough_since = enough_since or now
                nobody_else = self._num_rounds > 0 and len(self._members) == len(self._lines)
                if nobody_else or now > enough_since + patience_seconds:
                    return self._answer(said, is_last)
            if now > until:
                self._refuse(_missing(self._kind, self._address, said, mine.count, seconds))
            self._hear(POLL_SECONDS)
        return None

    def lost(self) -> list[int]:
        """Who took part in the last round, and is no more connected, or has left with a failure."""
        self._hear(0.0)
        return self._lost

    def say_goodbye(self, *, failed: bool) -> None:
        """Tells all that this member leaves for good."""
        self._tell(goodbye(failed=failed), self._lines)

    def has_newcomer(self) -> bool:
        """Whether somebody waits who did not take part in the last round.

        Who comes with the number of one who did is that one, lost and come back, if it is of the
        same machine, and is turned away if not.
        """
        self._hear(0.0)
        for caller, member in list(self._members.items()):
            if caller not in self._present:
                self._make_room(caller, member)
        return any(caller not in self._present for caller in self._members)

    def _make_room(self, caller: socket.socket, member: Member) -> None:
        for other, present in list(self._present.items()):
            if present.number == member.number and present.host == member.host:
                self._lost.append(member.number)
                self._forget(other)
        if member.number in (0, *(present.number for present in self._present.values())):
            words = f"{self._kind} {member.number} is there already, and another than this."
            self._tell({"error": words, "is_missing": False}, (caller,))
            self._forget(caller)

    def _hear(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                caller, _ = self._server.accept()
                caller.settimeout(SLACK)
                keep_alive(caller, self._silence_seconds)
                self._lines[caller] = b""
                self._selector.register(caller, selectors.EVENT_READ)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]  # a socket

    def _read(self, caller: socket.socket) -> None:
        try:
            chunk = caller.recv(LONGEST)
        except OSError:
            chunk = b""
        line, end, rest = (self._lines[caller] + chunk).partition(b"\n")
        self._lines[caller] = rest if end else line
        try:
            words = json.loads(line) if end else None
            if words == goodbye(failed=False):
                self._present.pop(caller, None)
            elif words == goodbye(failed=True):
                chunk = b""
            elif words is not None:
                self._members[caller] = introduced(self._kind, words)
        except (ValueError, TypeError, AttributeError, KeyError):
            chunk = b""  # it speaks another language
        if not chunk or len(line) > LONGEST:
            if caller in self._present:
                self._lost.append(self._present[caller].number)
            self._forget(caller)

    def _answer(self, said: Said, is_last: bool) -> Said:
        if is_last:
            self._stop_listening()
        self._num_rounds += 1
        self._lost = []
        self._present = dict(self._members)
        self._tell({"said": said}, self._members)
        self._members.clear()
        return said

    def _refuse(self, error: Error | None) -> None:
        if error is not None:
            words = {"error": str(error), "is_missing": isinstance(error, CoordinatorError)}
            self._tell(words, self._members)
            raise error

    def _tell(self, words: dict[str, Any], callers: Iterable[socket.socket]) -> None:
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.sendall(line_of(words))

    def _forget(self, caller: socket.socket) -> None:
        del self._lines[caller]
        self._members.pop(caller, None)
        self._present.pop(caller, None)
        self._selector.unregister(caller)
        caller.close()

    def _stop_listening(self) -> None:
        if self._server.fileno() != -1:
            self._selector.unregister(self._server)
            self._server.close()


def listen(address: str) -> socket.socket:
    """A socket that listens at host:port.

    Raises:
      CoordinatorError: If it cannot.
    """
    host, _, port = address.rpartition(":")
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(place[:2], family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise CoordinatorError(
            f"port {port} of {host} {'is taken' if taken else f'does not do: {error.strerror}'}. "
            "Tell all processes another, or let jddp.launch choose one."
        ) from error


def _mistake(kind: str, members: Iterable[Member]) -> ProcessMismatchError | None:
    """What members were told that cannot be."""
    there: dict[int, Member] = {}
    for member in members:
        first = there.setdefault(0, member)
        for name, value in first.same.items():
            if member.same.get(name) != value:
                return ProcessMismatchError(
                    f"{kind} {member.number} has another job than {kind} 0: {name} is "
                    f"{member.same.get(name)} there and {value} here. Give every {kind} the same."
                )
        if member.count != first.count:
            return ProcessMismatchError(
                f"{kind} {member.number} ({member.where}) was told that there are {member.count}, "
                f"and {kind} 0 ({first.where}) that there are {first.count}. Tell all the same."
            )
        other = there.setdefault(member.number, member)
        if other is not member:
            return ProcessMismatchError(
                f"two have come as {kind} {member.number}: {other.where}, and {member.where}. "
                "Give each a number of its own."
            )
    return None


def _missing(kind: str, address: str, said: Said, count: int, seconds: float) -> CoordinatorError:
    numbers = [str(number) for number in range(count) if number not in said]
    kinds = {"process": "processes"}.get(kind, f"{kind}s") if len(numbers) > 1 else kind
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return CoordinatorError(
        f"{kinds} {', '.join(numbers[:_SHOWN])}{more} of {count} did not come to {address} within "
        f"{seconds:.0f} s. Was each started, with a number of its own, and can it reach this "
        "address?"
    )
