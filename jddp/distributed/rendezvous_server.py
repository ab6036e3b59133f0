"""Member 0's end of a rendezvous: it listens, and sends each the information of all members."""

import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterable

from jddp.distributed.rendezvous import (
    POLL_SECONDS,
    SILENCE_SECONDS,
    Connection,
    Infos,
    Member,
    goodbye,
)
from jddp.errors import CoordinatorError, Error, ProcessMismatchError

_SHOWN = 8  # numbers of missing members in a message


class RendezvousServer:
    """Member 0's end.

    Args:
      kind: What members are called: "process" or "node".
      address: host:port under which the others connect.
      listens: host:port to listen on, if that is another.
      silence_seconds: Time without a sign of life after which a member is lost.
      is_enough: Whether these members would do without the missing ones; None if all are needed.
      patience_seconds: Time to wait for missing members all the same, except for those that were
        here in an earlier round and have left.

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
        is_enough: Callable[[Infos], bool] | None = None,
        patience_seconds: float = 0.0,
    ):
        self._kind, self._address, self._silence_seconds = kind, address, silence_seconds
        self._is_enough, self._patience_seconds = is_enough, patience_seconds
        self._clients: list[Connection] = []
        self._members: dict[Connection, Member] = {}  # that await an answer
        self._present: dict[Connection, Member] = {}  # that took part in the last round
        self._lost: list[int] = []  # of them
        self._num_rounds = 0
        self._server = listen(listens or address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def close(self) -> None:
        """Stops listening, and closes all connections."""
        self._stop_listening()
        for client in list(self._clients):
            self._forget(client)
        self._selector.close()

    def gather(self, mine: Member, *, seconds: float, is_last: bool = False) -> Infos:
        """The information of all members.

        Args:
          mine: Member 0.
          seconds: Time to wait for all.
          is_last: Whether to stop listening before members are answered: the port is free then.

        Raises:
          CoordinatorError: If members are missing; the others raise it too.
          ProcessMismatchError: If two have the same number, or other settings; likewise.
        """
        until, enough_since = time.monotonic() + seconds, None
        while True:
            members = [mine, *self._members.values()]
            self._refuse(_mismatch(self._kind, members))
            infos = {member.number: member.info for member in members}
            if len(infos) == mine.count:
                return self._answer(infos, is_last)
            now = time.monotonic()
            if self._is_enough is not None and self._is_enough(infos):
                enough_since = enough_since or now
                is_complete = self._num_rounds > 0 and len(self._members) == len(self._clients)
                if is_complete or now > enough_since + self._patience_seconds:
                    return self._answer(infos, is_last)
            if now > until:
                self._refuse(_missing(self._kind, self._address, infos, mine.count, seconds))
            self._receive(POLL_SECONDS)

    def lost(self) -> list[int]:
        """Members of the last round that are no longer connected, or have left with a failure."""
        self._receive(0.0)
        return self._lost

    def say_goodbye(self, *, failed: bool) -> None:
        """Informs all that this member leaves for good."""
        for client in self._clients:
            client.send(goodbye(failed=failed))

    def has_newcomer(self) -> bool:
        """Whether a member waits that did not take part in the last round.

        One with the number of a member that did is that member after a lost connection, if it is of
        the same machine, and is refused if not.
        """
        self._receive(0.0)
        for client, member in list(self._members.items()):
            if client not in self._present:
                self._replace_lost(client, member)
        return any(client not in self._present for client in self._members)

    def _replace_lost(self, client: Connection, member: Member) -> None:
        for other, present in list(self._present.items()):
            if present.number == member.number and present.host == member.host:
                self._lost.append(member.number)
                self._forget(other)
        if member.number in (0, *(present.number for present in self._present.values())):
            error = f"another has already connected as {self._kind} {member.number}."
            client.send({"error": error, "is_missing": False})
            self._forget(client)

    def _receive(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                client = Connection(self._server.accept()[0], self._silence_seconds)
                self._clients.append(client)
                self._selector.register(client.socket, selectors.EVENT_READ, client)
            else:
                self._read(key.data)

    def _read(self, client: Connection) -> None:
        try:
            message = client.receive(0.0)
            if message == goodbye(failed=False):
                self._present.pop(client, None)
            elif message == goodbye(failed=True):
                raise ConnectionError
            elif message is not None:
                if message.pop("kind") != self._kind:
                    raise ValueError
                self._members[client] = Member(**message)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            # The connection is lost, or the client is another program.
            if client in self._present:
                self._lost.append(self._present[client].number)
            self._forget(client)

    def _answer(self, infos: Infos, is_last: bool) -> Infos:
        if is_last:
            self._stop_listening()
        self._num_rounds += 1
        self._lost = []
        self._present, self._members = self._members, {}
        for client in self._present:
            client.send({"infos": infos})
        return infos

    def _refuse(self, error: Error | None) -> None:
        if error is not None:
            is_missing = isinstance(error, CoordinatorError)
            for client in self._members:
                client.send({"error": str(error), "is_missing": is_missing})
            raise error

    def _forget(self, client: Connection) -> None:
        self._clients.remove(client)
        self._members.pop(client, None)
        self._present.pop(client, None)
        self._selector.unregister(client.socket)
        client.socket.close()

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
        is_taken = error.errno == errno.EADDRINUSE
        reason = "is taken" if is_taken else f"cannot be used: {error.strerror}"
        raise CoordinatorError(
            f"port {port} of {host} {reason}. "
            "Give all processes another, or let jddp.launch choose one."
        ) from error


def _mismatch(kind: str, members: Iterable[Member]) -> ProcessMismatchError | None:
    """The first contradiction between members."""
    seen: dict[int, Member] = {}
    for member in members:
        first = seen.setdefault(0, member)
        for name, value in first.same.items():
            if member.same.get(name) != value:
                return ProcessMismatchError(
                    f"{kind} {member.number} has another job than {kind} 0: {name} is "
                    f"{member.same.get(name)} there and {value} here. Give every {kind} the same."
                )
        if member.count != first.count:
            return ProcessMismatchError(
                f"{kind} {member.number} ({member.where}) was started as one of {member.count}, "
                f"and {kind} 0 ({first.where}) as one of {first.count}. Give all the same count."
            )
        other = seen.setdefault(member.number, member)
        if other is not member:
            return ProcessMismatchError(
                f"two have connected as {kind} {member.number}: {other.where}, and {member.where}. "
                "Give each its own number."
            )
    return None


def _missing(kind: str, address: str, infos: Infos, count: int, seconds: float) -> CoordinatorError:
    numbers = [str(number) for number in range(count) if number not in infos]
    kinds = {"process": "processes"}.get(kind, f"{kind}s") if len(numbers) > 1 else kind
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return CoordinatorError(
        f"{kinds} {', '.join(numbers[:_SHOWN])}{more} of {count} did not connect to {address} "
        f"within {seconds:.0f} s. Was each started, with its own number, and can it reach this "
        "address?"
    )
