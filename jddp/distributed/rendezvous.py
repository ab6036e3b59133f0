"""Rendezvous: members of a group connect over TCP and learn which are missing, before JAX starts.

    server = RendezvousServer("process", "10.0.0.1:1234")     # member 0 listens
    infos = server.gather(mine, seconds=300)
    client = RendezvousClient("process", "node-0:1234")       # the others connect to it
    infos = client.gather(mine, seconds=300)

Each client sends a line. When all clients have sent one, each gets a line as its answer. The answer
is the same for all: the information of every member, or an error (a missing member, a number that
two members have, or different settings). A connection may stay open for further rounds. A member
that leaves for good reports whether it has failed. A member whose connection breaks without this
report is lost, and may connect again.
"""

import contextlib
import errno
import json
import os
import resource
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

from jddp.ground import errors
from jddp.ground.typing import JsonObject

POLL_SECONDS = 0.02
_SLACK = 5.0  # Seconds for member 0 to report that its time is over, before the others give up.
NOTICE_SECONDS = 5.0  # Time until a line reports that members are missing.
_LONGEST = 2**20  # Bytes of a message.
_CHUNK = 2**16
_SEND_SECONDS = 5.0
_PROBES = 4  # Unanswered probes until a connection is lost.
_PLURALS = {"process": "processes", "node": "nodes"}
_SHOWN = 8  # Numbers of missing members in a message.


class Connection:
    """A TCP connection on which each message is a line, an object of JSON.

    Args:
      stream: The socket.
      silence_seconds: Time without a sign of life after which the connection breaks.

    Attributes:
      messages: The messages that have arrived, and that nobody has taken yet.
    """

    def __init__(self, stream: socket.socket, silence_seconds: int):
        self._socket = stream
        self.fileno = stream.fileno
        self.close = stream.close
        self.messages = list[JsonObject]()
        self._rest = b""
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        between = max(1, silence_seconds // (_PROBES + 1))
        for name, value in (("KEEPIDLE", between), ("KEEPINTVL", between), ("KEEPCNT", _PROBES)):
            if option := getattr(socket, f"TCP_{name}", None):  # Linux has all options, macOS some.
                stream.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: JsonObject) -> None:
        """Sends a message, unless the connection is broken."""
        self._socket.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self, seconds: float) -> None:
        """Reads the bytes that arrive next: several messages, or a part of one.

        Raises:
          OSError: If nothing arrives in this time, or the connection is broken or closed.
          ValueError: If the other end is another program.
        """
        self._socket.settimeout(seconds)
        if not (chunk := self._socket.recv(_CHUNK)):
            raise ConnectionError
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) >= _LONGEST:
            raise ValueError(f"a message of more than {_LONGEST} bytes")
        try:
            self.messages += [dict(json.loads(line)) for line in lines]
        except (TypeError, RecursionError):
            raise ValueError from None

    def receive(self, seconds: float) -> JsonObject:
        """The next message, within this time; raises as `read` does."""
        until = time.monotonic() + seconds
        while not self.messages:
            self.read(max(0.0, until - time.monotonic()))
        return self.messages.pop(0)


class Notice:
    """Prints one line about a wait that has lasted for some seconds."""

    def __init__(self) -> None:
        self._at = time.monotonic() + NOTICE_SECONDS

    def give(self, text: str) -> None:
        """Prints the line if it is due."""
        if time.monotonic() > self._at:
            errors.report(text)
            self._at = float("inf")


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
    """The end of a member other than 0: it connects to member 0 and awaits its answer.

    Args:
      kind: Name of a member: "process" or "node".
      address: host:port of member 0.
      silence_seconds: Time without a sign of life after which a member is lost.

    Attributes:
      failure: The failure that member 0 has sent since the last round.
    """

    def __init__(self, kind: str, address: str, *, silence_seconds: int = 100):
        self.kind = kind
        self.address = address
        self.failure: JsonObject | None = None
        self._silence_seconds = silence_seconds
        self._server: Connection | None = None
        self._goodbye: JsonObject | None = None  # Last message of member 0.
        self._has_lost = False

    def close(self) -> None:
        """Closes the connection."""
        if self._server is not None:
            self._server.close()
        self._server = None
        self._has_lost = False

    def lost(self) -> list[int]:
        """Member 0, if it is no longer connected, or has left with a failure."""
        server = None if self._goodbye else self._server
        if server is not None and (server.messages or wait([server.fileno()], 0)):
            try:
                self._goodbye = self._receive(server)
            except (OSError, ValueError):
                self._has_lost = True
        return [0] if self._has_lost or self._goodbye == {"failed": True} else []

    def _receive(self, server: Connection, until: float = 0.0) -> JsonObject | None:
        """The next message, until a moment after this time; None for a failure, which is kept."""
        message = server.receive(max(0.0, until - time.monotonic()) + _SLACK)
        self.failure = message.get("failure")
        return None if self.failure else message

    def tell(self, **message: object) -> None:
        """Sends member 0, if it is connected, a `failure`; or, leaving for good, if it `failed`."""
        if self._server is not None:
            self._server.send(message)

    def gather(self, mine: Member, *, seconds: float) -> dict[int, JsonObject]:
        """The information of all members.

        Args:
          mine: This member.
          seconds: Time to wait for member 0, and for all.

        Raises:
          CoordinatorError: If member 0 cannot be reached or has left, or members are missing.
          ProcessMismatchError: If members have different settings.
        """
        me = f"{self.kind} {mine.number} of {mine.count}"
        first = f"{self.kind} 0 at {self.address}"
        until = time.monotonic() + seconds
        if self._has_lost:
            self.close()  # Member 0 or the network may be back.
        answer = self._goodbye
        while answer is None:
            try:
                if self._server is None:
                    stream = connect_to(self.address, me, until)
                    self._server = Connection(stream, self._silence_seconds)
                self._server.send({"kind": self.kind, **asdict(mine)})
                while answer is None:
                    answer = self._receive(self._server, until)
            except ValueError:
                raise errors.CoordinatorError(
                    f"the program that listens at {self.address} is not {self.kind} 0 of a "
                    "starting job: the job has started already, or it is another program."
                ) from None
            except OSError as error:
                self.close()
                if time.monotonic() > until:
                    text = f"{me} has received nothing from {first} in {seconds:.0f} s."
                    raise errors.CoordinatorError(text) from error
                time.sleep(POLL_SECONDS)
        if "error" in answer:
            kind = errors.CoordinatorError if answer["is_missing"] else errors.ProcessMismatchError
            raise kind(answer["error"])
        if "infos" not in answer:
            raise errors.CoordinatorError(f"{first} has left the job.")
        return {int(number): info for number, info in answer["infos"].items()}


def connect_to(address: str, name: str, until: float) -> socket.socket:
    """A connection, as soon as a program listens at the address.

    Raises:
      CoordinatorError: If no program listens in time.
    """
    host, _, port = address.rpartition(":")
    since = time.monotonic()
    notice = Notice()
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError as error:
            reason = errors.words_of(error)
        kind = name.partition(" ")[0]
        notice.give(f"{name} is waiting for {kind} 0 at {address}: {reason}")
        if time.monotonic() > until:
            raise errors.CoordinatorError(
                f"{name} cannot reach {kind} 0 at {address}: {reason}, for "
                f"{time.monotonic() - since:.0f} s. Does {kind} 0 run there, is the port open, "
                f"was every {kind} given this address?"
            )
        time.sleep(POLL_SECONDS)


class RendezvousServer:
    """The end of member 0: it listens, and answers all others.

    Args:
      kind: Name of a member: "process" or "node".
      address: host:port of member 0.
      listens: host:port to listen on, if it differs from the address.
      silence_seconds: Time without a sign of life after which a member is lost.

    Attributes:
      failure: The failure that a member has sent since the last round.

    Raises:
      CoordinatorError: If the port is taken, or the address is not one of this machine.
    """

    def __init__(
        self, kind: str, address: str, listens: str | None = None, *, silence_seconds: int = 100
    ):
        self.kind = kind
        self.address = address
        self.failure: JsonObject | None = None
        self._silence_seconds = silence_seconds
        # All connections, each with the member that awaits an answer.
        self._waiting: dict[Connection, Member | None] = {}
        self._present: dict[Connection, Member] = {}  # Members of the last round.
        self._lost: list[int] = []  # Lost members of the last round.
        self._listening = listen(listens or address)
        self._listening.setblocking(False)  # A client may have gone before it is accepted.

    def close(self) -> None:
        """Stops listening, and closes all connections."""
        self._listening.close()
        for client in list(self._waiting):
            self._forget(client)

    def gather(
        self, mine: Member, *, seconds: float, is_last: bool = False
    ) -> dict[int, JsonObject]:
        """The information of all members.

        Args:
          mine: Member 0.
          seconds: Time to wait for all.
          is_last: Whether to stop listening before the members get their answers, to free the port.

        Raises:
          CoordinatorError: If members are missing. The other members raise it too.
          ProcessMismatchError: If two members have the same number, or different settings. The
            other members raise it too.
        """
        try:
            infos = self._wait_for_all(mine, seconds)
        except errors.Error as error:
            is_missing = isinstance(error, errors.CoordinatorError)
            for client in self._members():
                client.send({"error": str(error), "is_missing": is_missing})
            raise
        if is_last:
            self._listening.close()
        self._present = self._members()
        self._lost = []
        self.failure = None
        self._waiting = dict.fromkeys(self._waiting)
        for client in self._present:
            client.send({"infos": infos})
        return infos

    def _members(self) -> dict[Connection, Member]:
        return {client: member for client, member in self._waiting.items() if member is not None}

    def _wait_for_all(self, mine: Member, seconds: float) -> dict[int, JsonObject]:
        until = time.monotonic() + seconds
        notice = Notice()
        allow_connections()
        while True:
            members = [mine, *self._members().values()]
            self._refuse_mismatch(members)
            infos = {member.number: member.info for member in members}
            if len(infos) == mine.count:
                return infos
            missing = [str(number) for number in range(mine.count) if number not in infos]
            which = ", ".join(missing[:_SHOWN])
            which += f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            name = self.kind if len(missing) == 1 else _PLURALS[self.kind]
            if time.monotonic() > until:
                raise errors.CoordinatorError(
                    f"{name} {which} of {mine.count} did not connect to {self.address} within "
                    f"{seconds:.0f} s. Was each started, with its own number, and can it reach "
                    "this address?"
                )
            notice.give(f"waiting at {self.address} for {name} {which} of {mine.count}")
            self._receive(POLL_SECONDS)

    def lost(self) -> list[int]:
        """Members of the last round that are no longer connected, or have left with a failure."""
        self._receive(0.0)
        return self._lost

    def tell(self, **message: object) -> None:
        """Sends all members a `failure`; or, leaving for good, if it `failed`."""
        for client in self._waiting:
            client.send(message)

    def _receive(self, seconds: float) -> None:
        """Takes the connections and messages that arrive next."""
        ends: list[Any] = [self._listening, *self._waiting]
        for ready in wait(ends, seconds):
            if isinstance(ready, Connection):
                self._read(ready)
                continue
            with contextlib.suppress(ConnectionError, BlockingIOError):  # The client has gone.
                stream = self._listening.accept()[0]
                self._waiting[Connection(stream, self._silence_seconds)] = None

    def _read(self, client: Connection) -> None:
        try:
            client.read(0.0)
            while client.messages:
                match client.messages.pop(0):
                    case {"failed": False}:
                        self._present.pop(client, None)
                    case {"failure": failure} if client in self._present:
                        self.failure = dict(failure)
                    case {"kind": self.kind, **about}:
                        self._waiting[client] = Member(**about)
                    case _:
                        raise ConnectionError
        except (OSError, ValueError, TypeError):
            # The client is lost, has left with a failure, or is another program.
            self._forget(client)

    def _forget(self, client: Connection) -> None:
        del self._waiting[client]
        if client in self._present:
            self._lost.append(self._present.pop(client).number)
        client.close()

    def _refuse_mismatch(self, members: Iterable[Member]) -> None:
        """Raises the first contradiction between members."""
        seen: dict[int, Member] = {}
        for member in members:
            if (other := seen.setdefault(member.number, member)) is not member:
                raise errors.ProcessMismatchError(
                    f"two have connected as {self.kind} {member.number}: {other.where}, and "
                    f"{member.where}. Give each its own number."
                )
        same = (
            (f"{x.number} ({x.where})", {"count": str(x.count)} | x.same) for x in seen.values()
        )
        errors.refuse_differences(self.kind, "job", same)


def listen(address: str) -> socket.socket:
    """A socket that listens at host:port.

    Raises:
      CoordinatorError: If the port is taken, or cannot be used.
    """
    host, _, port = address.rpartition(":")
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(place[:2], family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        reason = "is taken" if is_taken else f"cannot be used: {errors.words_of(error)}"
        raise errors.CoordinatorError(
            f"port {port} of {host} {reason}. "
            "Give all processes another port, or let jddp.launch choose one."
        ) from error


def allow_connections() -> None:
    """Raises the soft limit of open files to the hard one: it is 1,024 in many shells."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
