"""Rendezvous: members of a group connect over TCP and learn which are missing, before JAX starts.

    with RendezvousServer("process", "10.0.0.1:1234") as server:   # member 0 listens
        infos = server.gather(mine, seconds=300)
    with RendezvousClient("process", "node-0:1234") as client:     # the others connect to it
        infos = client.gather(mine, seconds=300)

Each client sends a line. When all have, each is answered by a line: the information of every
member, or the same error for all: a missing member, a number that two of them have, different
settings. A connection may stay open for further rounds. A member whose connection breaks without
a goodbye is lost, and may connect again. This module holds what both ends share.
"""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SILENCE_SECONDS = 100
LONGEST = 2**16  # bytes of a line
POLL_SECONDS = 0.02
SLACK = 5.0  # seconds in which member 0 reports that its time is over, before the others give up
_PROBES = 4  # unanswered ones, after which a connection is lost

Infos = dict[int, dict[str, Any]]  # by the numbers of the members
Condition = Callable[[], bool]


def always() -> bool:
    """The condition of a caller that never stops waiting early."""
    return True


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

    @property
    def host(self) -> str:
        """The machine that it runs on."""
        return self.where.partition(",")[0]


class Endpoint:
    """One end of a rendezvous.

    Args:
      kind: What members are called: "process" or "node".
      address: host:port of member 0.
      silence_seconds: Time without a sign of life after which the other end is lost.
    """

    def __init__(self, kind: str, address: str, silence_seconds: int):
        self._kind, self._address, self._silence_seconds = kind, address, silence_seconds

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        raise NotImplementedError

    def _keep_alive(self, connection: socket.socket) -> None:
        """Makes a connection break when the other machine has been silent for too long."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        between = max(1, self._silence_seconds // (_PROBES + 1))
        options = {"TCP_KEEPIDLE": between, "TCP_KEEPINTVL": between, "TCP_KEEPCNT": _PROBES}
        for name, value in options.items():
            if hasattr(socket, name):  # Linux, and macOS in part
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def goodbye(*, failed: bool) -> dict[str, bool]:
    """The message of a member that leaves for good."""
    return {"goodbye": True, "failed": failed}


def encode(message: dict[str, Any]) -> bytes:
    """A message as the line that is sent."""
    return json.dumps(message).encode() + b"\n"


def decode_member(kind: str, message: dict[str, Any]) -> Member:
    """The member that introduces itself by a message.

    Raises:
      TypeError: If the message is of another program.
      ValueError: If it is of another kind.
    """
    if message.pop("kind") != kind:
        raise ValueError
    member = Member(**message)
    types = (member.number, int), (member.count, int), (member.same, dict), (member.info, dict)
    if not all(isinstance(value, wanted) for value, wanted in types):
        raise TypeError
    return member
