"""The end of the other members of a rendezvous: they connect to member 0 and await its answer."""

import contextlib
import dataclasses
import json
import socket
import time

from jddp.distributed.rendezvous import (
    LONGEST,
    POLL_SECONDS,
    SILENCE_SECONDS,
    SLACK,
    Condition,
    Endpoint,
    Infos,
    Member,
    always,
    encode,
    goodbye,
)
from jddp.errors import CoordinatorError, ProcessMismatchError


class RendezvousClient(Endpoint):
    """The end of a member other than 0.

    Args:
      kind: What members are called.
      address: host:port of member 0.
      silence_seconds: Time without a sign of life after which member 0 is lost.
    """

    def __init__(self, kind: str, address: str, *, silence_seconds: int = SILENCE_SECONDS):
        super().__init__(kind, address, silence_seconds)
        self._socket: socket.socket | None = None
        self._received = b""  # beyond the last line
        self._has_lost = False

    def close(self) -> None:
        """Closes the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self._received, self._has_lost = None, b"", False

    def lost(self) -> list[int]:
        """Member 0, if it is no longer connected, or has left with a failure."""
        if self._socket is not None and not self._received:
            self._socket.settimeout(0.0)
            try:
                self._received = self._socket.recv(LONGEST)
                self._has_lost = self._received in (b"", encode(goodbye(failed=True)))
            except BlockingIOError:
                pass
            except OSError:
                self._has_lost = True
        return [0] if self._has_lost else []

    def say_goodbye(self, *, failed: bool) -> None:
        """Informs member 0 that this one leaves for good."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(encode(goodbye(failed=failed)))

    def gather(
        self, mine: Member, *, seconds: float, is_wanted: Condition = always
    ) -> Infos | None:
        """The information of all members.

        Args:
          mine: This member.
          seconds: Time to wait for member 0, and for all.
          is_wanted: Condition that is asked repeatedly; waiting ends when it is false.

        Returns:
          None if waiting ended early.

        Raises:
          CoordinatorError: If member 0 cannot be reached or has left, or members are missing.
          ProcessMismatchError: If members have different settings.
        """
        me = f"{self._kind} {mine.number} of {mine.count}"
        until = time.monotonic() + seconds
        if self._has_lost and not self._received:
            self.close()  # Member 0 may be back, or the network.
        while True:
            if self._socket is None:
                self._socket = connect(self._address, me, until, seconds, is_wanted)
            if self._socket is None:
                return None
            self._keep_alive(self._socket)
            try:
                self._socket.sendall(encode({"kind": self._kind, **dataclasses.asdict(mine)}))
                line = self._read_line(until + SLACK, is_wanted)
            except OSError:
                line = b""
            if line is None:
                return None
            if line:
                return self._decode(line)
            self.close()
            if time.monotonic() > until:
                raise CoordinatorError(
                    f"{me} has received nothing from {self._kind} 0 at {self._address} in "
                    f"{seconds:.0f} s. Is it another program that listens there?"
                )
            time.sleep(POLL_SECONDS)

    def _read_line(self, until: float, is_wanted: Condition) -> bytes | None:
        """The answer; empty if there is none, None if waiting ended early."""
        assert self._socket is not None
        self._socket.settimeout(POLL_SECONDS)
        while b"\n" not in self._received and self._received[:1] in (b"", b"{"):
            if not is_wanted():
                return None
            try:
                chunk = self._socket.recv(LONGEST)
            except TimeoutError:
                if time.monotonic() > until:
                    return b""
                continue
            if not chunk:
                return b""
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _decode(self, line: bytes) -> Infos:
        try:
            message = json.loads(line)
        except ValueError:
            raise CoordinatorError(
                f"the program that listens at {self._address} is not {self._kind} 0 of a starting "
                "job: the job has started already, or it is another program."
            ) from None
        if "error" in message:
            kind = CoordinatorError if message["is_missing"] else ProcessMismatchError
            raise kind(message["error"])
        if "infos" not in message:
            raise CoordinatorError(f"{self._kind} 0 at {self._address} has left the job.")
        return {int(number): info for number, info in message["infos"].items()}


def connect(
    address: str, name: str, until: float, seconds: float, is_wanted: Condition = always
) -> socket.socket | None:
    """A connection, as soon as a program listens there; None if waiting ended early.

    Raises:
      CoordinatorError: If none does in time.
    """
    host, _, port = address.rpartition(":")
    tries = 0
    while is_wanted():
        tries += 1
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > until:
            kind = name.partition(" ")[0]
            raise CoordinatorError(
                f"{name} cannot reach {kind} 0 at {address}: {reason}, {tries} times in "
                f"{seconds:.0f} s. Does {kind} 0 run there, is the port open, was every {kind} "
                "given this address?"
            )
        time.sleep(POLL_SECONDS)
    return None
