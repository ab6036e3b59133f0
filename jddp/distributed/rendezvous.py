"""Who has come? Members of a group find each other over TCP, before there is JAX.

    with Roll("process", "10.0.0.1:1234") as roll:          # member 0 listens
        said = roll.gather(mine, seconds=300)
    with Caller("process", "node-0:1234") as caller:        # the others call
        said = caller.gather(mine, seconds=300)

Each says a line. When all have, each is answered by a line: what every member has said, or what is
wrong, to all alike: who is missing, who has come twice, who was told another number. A connection
may stay open for further rounds; who has not said goodbye when it breaks is lost, and may come
back. This is what both ends have in common; `roll` and `caller` are the ends.
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
SLACK = 5.0  # seconds in which member 0 says that its time is over, before the others give up
_PROBES = 4  # that are not answered, and a connection is lost

Said = dict[int, dict[str, Any]]
Condition = Callable[[], bool]


def always() -> bool:
    """Whether to go on waiting, if nobody can change their mind."""
    return True


@dataclass(frozen=True)
class Member:
    """One of a group, as it introduces itself.

    Attributes:
      number: From 0.
      count: Of the group.
      same: What has to be so for all of a group, by its name.
      says: What the others should know.
      where: It runs, for messages.
    """

    number: int
    count: int
    same: dict[str, str] = field(default_factory=dict)
    says: dict[str, Any] = field(default_factory=dict)
    where: str = field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")

    @property
    def host(self) -> str:
        """The machine it runs on."""
        return self.where.partition(",")[0]


def goodbye(*, failed: bool) -> dict[str, bool]:
    """What a member says when it leaves for good."""
    return {"goodbye": True, "failed": failed}


def line_of(words: dict[str, Any]) -> bytes:
    """As it is sent."""
    return json.dumps(words).encode() + b"\n"


def introduced(kind: str, words: dict[str, Any]) -> Member:
    """A member from the line it has said.

    Raises:
      TypeError: If the line is another's.
      ValueError: If it is of another kind.
    """
    if words.pop("kind") != kind:
        raise ValueError
    member = Member(**words)
    shapes = (member.number, int), (member.count, int), (member.same, dict), (member.says, dict)
    if not all(isinstance(value, shape) for value, shape in shapes):
        raise TypeError
    return member


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """Lets a connection break when nothing has come from the other machine for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    between = max(1, seconds // (_PROBES + 1))
    options = {"TCP_KEEPIDLE": between, "TCP_KEEPINTVL": between, "TCP_KEEPCNT": _PROBES}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux, and macOS in part
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
