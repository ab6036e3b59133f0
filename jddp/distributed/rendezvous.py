"""Rendezvous: members of a group connect over TCP and learn which are missing, before JAX starts.

    server = RendezvousServer("process", "10.0.0.1:1234")     # member 0 listens
    infos = server.gather(mine, seconds=300)
    client = RendezvousClient("process", "node-0:1234")       # the others connect to it
    infos = client.gather(mine, seconds=300)

Each client sends a line. When all have sent one, each gets a line as its answer: the information of
every member, or an error, the same for all: a missing member, a number that two members have, or
different settings. A connection may stay open for further rounds. A member that leaves for good
reports whether it has failed. A member whose connection breaks without this report is lost, and may
connect again. Member 0's end is in `rendezvous_server`.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait

from jddp.ground.errors import CoordinatorError, ProcessMismatchError, report, words_of
from jddp.ground.typing import JsonObject, Settings

POLL_SECONDS = 0.02
_SLACK = 5.0  # seconds in which member 0 reports that its time is over, before the others give up
NOTICE_SECONDS = 5.0  # after which a line reports that members are missing
_LONGEST = 2**20  # bytes of a message
_CHUNK = 2**16
_SEND_SECONDS = 5.0
_PROBES = 4  # unanswered probes, after which a connection is lost
Infos = dict[int, JsonObject]  # by the numbers of the members


class Connection:
    """A TCP connection on which each message is a line, an object of JSON.

    Args:
      stream: The socket.
      silence_seconds: Time without a sign of life after which the connection breaks.

    Attributes:
      begun: Time at which an incomplete message began, by `time.monotonic`, or the connection if
        nothing has arrived on it; None after a message.
    """

    def __init__(self, stream: socket.socket, silence_seconds: int):
        self._socket = stream
        self.fileno = stream.fileno
        self._received = b""
        self.begun: float | None = time.monotonic()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        between = max(1, silence_seconds // (_PROBES + 1))
        for name, value in (("KEEPIDLE", between), ("KEEPINTVL", between), ("KEEPCNT", _PROBES)):
            if option := getattr(socket, f"TCP_{name}", None):  # Linux, and macOS in part
                stream.setsockopt(socket.IPPROTO_TCP, option, value)

    def close(self) -> None:
        """Closes it."""
        self._socket.close()

    def send(self, message: JsonObject) -> None:
        """Sends a message, unless the connection is broken."""
        self._socket.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> JsonObject:
        """The next message.

        Raises:
          OSError: If it is not complete after this time, or the connection is broken or closed.
          ValueError: If the other end is another program.
        """
        until = time.monotonic() + seconds
        while (message := self._next()) is None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            self._read(left)
        return message

    def arrived(self) -> list[JsonObject]:
        """The messages that are complete by now, if something has arrived on the connection.

        Raises:
          OSError: If the connection is broken or closed.
          ValueError: If the other end is another program.
        """
        with contextlib.suppress(BlockingIOError):
            self._read(0)
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _read(self, seconds: float) -> None:
        self._socket.settimeout(seconds)
        if not (chunk := self._socket.recv(_CHUNK)):
            raise ConnectionError
        self.begun = self.begun or time.monotonic()
        self._received += chunk

    def _next(self) -> JsonObject | None:
        line, end, rest = self._received.partition(b"\n")
        if not end:
            if len(line) >= _LONGEST:
                raise ValueError(f"a message of more than {_LONGEST} bytes")
            return None
        self._received = rest
        self.begun = time.monotonic() if rest else None
        try:
            return dict(json.loads(line))
        except (TypeError, RecursionError):
            raise ValueError from None


class Notice:
    """Prints one line about a wait that has lasted for some seconds."""

    def __init__(self) -> None:
        self._at = time.monotonic() + NOTICE_SECONDS

    def give(self, text: str) -> None:
        """Prints the line if it is due."""
        if time.monotonic() > self._at:
            report(text)
            self._at = math.inf


@dataclass(frozen=True)
class Member:
    """One member of a group, as it introduces itself.

    Attributes:
      number: Number of the member, from 0.
      count: Number of members of the group.
      same: Settings that must be equal for all members, by name.
      info: Information for the other members.
      where: Host and process, for messages.
    """

    number: int
    count: int
    same: dict[str, str] = field(default_factory=dict)
    info: JsonObject = field(default_factory=dict)
    where: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")

    def __post_init__(self) -> None:
        """Refuses a message of another program."""
        if [*map(type, vars(self).values())] != [int, int, dict, dict, str]:
            raise TypeError


class RendezvousClient:
    """The end of a member other than 0, which connects to member 0 and awaits its answer.

    Args:
      kind: Name of a member: "process" or "node".
      address: host:port of member 0.
      silence_seconds: Time without a sign of life after which a member is lost.
    """

    def __init__(self, kind: str, address: str, *, silence_seconds: int = 100):
        self.kind = kind
        self.address = address
        self._silence_seconds = silence_seconds
        self._server: Connection | None = None
        self._goodbye: JsonObject | None = None  # of member 0
        self._has_lost = False

    def close(self) -> None:
        """Closes the connection."""
        if self._server is not None:
            self._server.close()
        self._server = None
        self._has_lost = False

    def lost(self) -> list[int]:
        """Member 0, if it is no longer connected, or has left with a failure."""
        if self._server is not None and self._goodbye is None and wait([self._server.fileno()], 0):
            try:
                self._goodbye = self._server.receive(_SLACK)
            except (OSError, ValueError):
                self._has_lost = True
        return [0] if self._has_lost or self._goodbye == {"failed": True} else []

    def send_failure(self, failure: JsonObject) -> None:
        """Informs member 0 of the first failure here, if it is connected."""
        if self._server is not None:
            self._server.send({"failure": failure})

    def say_goodbye(self, *, failed: bool) -> None:
        """Informs member 0, if it is connected, that this member leaves for good."""
        if self._server is not None:
            self._server.send({"failed": failed})

    def gather(self, mine: Member, *, seconds: float) -> Infos:
        """The information of all members.

        Args:
          mine: This member.
          seconds: Time to wait for member 0, and for all.

        Raises:
          CoordinatorError: If member 0 cannot be reached or has left, or members are missing.
          ProcessMismatchError: If members have different settings.
        """
        until = time.monotonic() + seconds
        if self._has_lost:
            self.close()  # Member 0 may be back, or the network.
        while time.monotonic() <= until:
            try:
                return self._read_answer(self._goodbye or self._ask(mine, until))
            except OSError:
                self.close()
            time.sleep(POLL_SECONDS)
        raise CoordinatorError(
            f"{self.kind} {mine.number} of {mine.count} has received nothing from {self.kind} 0 "
            f"at {self.address} in {seconds:.0f} s. Is it another program that listens there?"
        )

    def _ask(self, mine: Member, until: float) -> JsonObject:
        """Member 0's answer."""
        if self._server is None:
            stream = connect_to(self.address, f"{self.kind} {mine.number} of {mine.count}", until)
            self._server = Connection(stream, self._silence_seconds)
        self._server.send({"kind": self.kind, **asdict(mine)})
        try:
            return self._server.receive(max(0, until - time.monotonic()) + _SLACK)
        except ValueError:
            raise CoordinatorError(
                f"the program that listens at {self.address} is not {self.kind} 0 of a "
                "starting job: the job has started already, or it is another program."
            ) from None

    def _read_answer(self, answer: JsonObject) -> Infos:
        if "error" in answer:
            kind = CoordinatorError if answer["is_missing"] else ProcessMismatchError
            raise kind(answer["error"])
        if "infos" not in answer:
            raise CoordinatorError(f"{self.kind} 0 at {self.address} has left the job.")
        return {int(number): info for number, info in answer["infos"].items()}


def connect_to(address: str, name: str, until: float) -> socket.socket:
    """A connection, as soon as a program listens there.

    Raises:
      CoordinatorError: If no program does in time.
    """
    host, _, port = address.rpartition(":")
    since = time.monotonic()
    tries = 0
    notice = Notice()
    while True:
        tries += 1
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError as error:
            reason = words_of(error)
        kind = name.partition(" ")[0]
        notice.give(f"{name} is waiting for {kind} 0 at {address}: {reason}")
        if time.monotonic() > until:
            raise CoordinatorError(
                f"{name} cannot reach {kind} 0 at {address}: {reason}, {tries} times in "
                f"{time.monotonic() - since:.0f} s. Does {kind} 0 run there, is the port open, was "
                f"every {kind} given this address?"
            )
        time.sleep(POLL_SECONDS)


def refuse_differences(kind: str, subject: str, members: Iterable[tuple[str, Settings]]) -> None:
    """Compares all members' values with the values of member 0, which comes first.

    Args:
      kind: Name of a member: "process" or "node".
      subject: Common name of the values.
      members: Number of each member, perhaps with its place, and its values by name.

    Raises:
      ProcessMismatchError: If a value differs.
    """
    (_, first), *others = members
    for member, other in others:
        if differ := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            there, here = (values.get(differ[0], "nothing") for values in (other, first))
            more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
            raise ProcessMismatchError(
                f"{kind} {member} has another {subject} than {kind} 0: {differ[0]} is {there} "
                f"there and {here} here{more}. Give every {kind} the same."
            )
