"""Rendezvous: members of a group connect over TCP and learn which are missing, before JAX starts.

    server = RendezvousServer("process", "10.0.0.1:1234")     # member 0 listens
    infos = server.gather(mine, seconds=300)
    client = RendezvousClient("process", "node-0:1234")       # the others connect to it
    infos = client.gather(mine, seconds=300)

Each client sends a line. When all have, each is answered by a line: the information of every
member, or the same error for all: a missing member, a number that two of them have, different
settings. A connection may stay open for further rounds. A member whose connection breaks without
a goodbye is lost, and may connect again. Member 0's end is in `rendezvous_server`.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from jddp.errors import CoordinatorError, ProcessMismatchError

SILENCE_SECONDS = 100
POLL_SECONDS = 0.02
_LONGEST = 2**20  # bytes of a line
_SLACK = 5.0  # seconds in which member 0 reports that its time is over, before the others give up
_PROBES = 4  # unanswered ones, after which a connection is lost

Infos = dict[int, dict[str, Any]]  # by the numbers of the members


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
    info: dict[str, Any] = field(default_factory=dict)
    where: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")

    def __post_init__(self) -> None:
        """Refuses what another program has sent."""
        given = (self.number, self.count, self.same, self.info, self.where)
        if not all(map(isinstance, given, (int, int, dict, dict, str))):
            raise TypeError

    @property
    def host(self) -> str:
        """The machine that it runs on."""
        return self.where.partition(",")[0]


class Connection:
    """A TCP connection on which each message is a line, an object of JSON.

    Args:
      stream: The socket, an attribute `socket` afterwards.
      silence_seconds: Time without a sign of life after which the connection breaks.
    """

    def __init__(self, stream: socket.socket, silence_seconds: int):
        self.socket = stream
        self._received = b""  # beyond the last message
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        between = max(1, silence_seconds // (_PROBES + 1))
        options = {"TCP_KEEPIDLE": between, "TCP_KEEPINTVL": between, "TCP_KEEPCNT": _PROBES}
        for name, value in options.items():
            if hasattr(socket, name):  # Linux, and macOS in part
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, unless the connection is broken."""
        self.socket.settimeout(_SLACK)
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, if it comes in this time.

        Raises:
          OSError: If the connection is broken or closed.
          ValueError: If the other end is another program.
        """
        if b"\n" not in self._received:
            self.socket.settimeout(seconds)
            try:
                chunk = self.socket.recv(2**16)
            except (BlockingIOError, TimeoutError):
                return None
            if not chunk:
                raise ConnectionError
            self._received += chunk
        if not self._received.startswith(b"{") or len(self._received) > _LONGEST:
            raise ValueError
        line, end, rest = self._received.partition(b"\n")
        if not end:
            return None
        self._received = rest
        return dict(json.loads(line))


class RendezvousClient:
    """The end of a member other than 0, which connects to member 0 and awaits its answer.

    Args:
      kind: What members are called: "process" or "node".
      address: host:port of member 0.
      silence_seconds: Time without a sign of life after which member 0 is lost.
    """

    def __init__(self, kind: str, address: str, *, silence_seconds: int = SILENCE_SECONDS):
        self._kind, self._address, self._silence_seconds = kind, address, silence_seconds
        self._server: Connection | None = None
        self._goodbye: dict[str, Any] | None = None  # of member 0
        self._has_lost = False

    def close(self) -> None:
        """Closes the connection."""
        if self._server is not None:
            self._server.socket.close()
            self._server, self._has_lost = None, False

    def lost(self) -> list[int]:
        """Member 0, if it is no longer connected, or has left with a failure."""
        if self._server is not None and self._goodbye is None:
            try:
                self._goodbye = self._server.receive(0.0)
            except (OSError, ValueError):
                self._has_lost = True
        return [0] if self._has_lost or self._goodbye == goodbye(failed=True) else []

    def say_goodbye(self, *, failed: bool) -> None:
        """Informs member 0 that this one leaves for good."""
        if self._server is not None:
            self._server.send(goodbye(failed=failed))

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
        while True:
            try:
                return self._read_answer(self._goodbye or self._ask(mine, until))
            except OSError:
                self.close()
            if time.monotonic() > until:
                raise CoordinatorError(
                    f"{self._kind} {mine.number} of {mine.count} has received nothing from "
                    f"{self._kind} 0 at {self._address} in {seconds:.0f} s. Is it another program "
                    "that listens there?"
                )
            time.sleep(POLL_SECONDS)

    def _ask(self, mine: Member, until: float) -> dict[str, Any]:
        """Member 0's answer."""
        if self._server is None:
            name = f"{self._kind} {mine.number} of {mine.count}"
            stream = connect(self._address, name, until)
            self._server = Connection(stream, self._silence_seconds)
        self._server.send({"kind": self._kind, **asdict(mine)})
        while True:
            try:
                answer = self._server.receive(POLL_SECONDS)
            except ValueError:
                raise CoordinatorError(
                    f"the program that listens at {self._address} is not {self._kind} 0 of a "
                    "starting job: the job has started already, or it is another program."
                ) from None
            if answer is not None:
                return answer
            if time.monotonic() > until + _SLACK:
                raise TimeoutError

    def _read_answer(self, answer: dict[str, Any]) -> Infos:
        if "error" in answer:
            kind = CoordinatorError if answer["is_missing"] else ProcessMismatchError
            raise kind(answer["error"])
        if "infos" not in answer:
            raise CoordinatorError(f"{self._kind} 0 at {self._address} has left the job.")
        return {int(number): info for number, info in answer["infos"].items()}


def connect(address: str, name: str, until: float) -> socket.socket:
    """A connection, as soon as a program listens there.

    Raises:
      CoordinatorError: If none does in time.
    """
    host, _, port = address.rpartition(":")
    since, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > until:
            kind = name.partition(" ")[0]
            raise CoordinatorError(
                f"{name} cannot reach {kind} 0 at {address}: {reason}, {tries} times in "
                f"{time.monotonic() - since:.0f} s. Does {kind} 0 run there, is the port open, was "
                f"every {kind} given this address?"
            )
        time.sleep(POLL_SECONDS)


def goodbye(*, failed: bool) -> dict[str, Any]:
    """The message of a member that leaves for good."""
    return {"goodbye": True, "failed": failed}
