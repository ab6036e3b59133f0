"""The end of every other member of a roll call: it calls member 0, and waits for the answer."""

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
    Member,
    Said,
    always,
    goodbye,
    keep_alive,
    line_of,
)
from jddp.errors import CoordinatorError, ProcessMismatchError


class Caller:
    """The end of each other member.

    Args:
      kind: What members are called.
      address: host:port of member 0.
      silence_seconds: After which it is lost.
    """

    def __init__(self, kind: str, address: str, *, silence_seconds: int = SILENCE_SECONDS):
        self._kind, self._address, self._silence_seconds = kind, address, silence_seconds
        self._socket: socket.socket | None = None
        self._heard = b""  # beyond the last line
        self._has_lost = False

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self._heard, self._has_lost = None, b"", False

    def lost(self) -> list[int]:
        """Member 0, if it is no more connected, or has left with a failure."""
        if self._socket is not None and not self._heard:
            self._socket.settimeout(0.0)
            try:
                self._heard = self._socket.recv(LONGEST)
                self._has_lost = self._heard in (b"", line_of(goodbye(failed=True)))
            except BlockingIOError:
                pass
            except OSError:
                self._has_lost = True
        return [0] if self._has_lost else []

    def say_goodbye(self, *, failed: bool) -> None:
        """Tells member 0 that this one leaves for good."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(line_of(goodbye(failed=failed)))

    def gather(self, mine: Member, *, seconds: float, is_wanted: Condition = always) -> Said | None:
        """What all members say, by their numbers.

        Args:
          mine: Of this member.
          seconds: To wait for member 0, and for all.
          is_wanted: Asked again and again; nobody is waited for when it says no.

        Returns:
          None if it is wanted no more.

        Raises:
          CoordinatorError: If member 0 cannot be reached, or not all have come to it, or it has
            said goodbye.
          ProcessMismatchError: If members were told different things.
        """
        me = f"{self._kind} {mine.number} of {mine.count}"
        until = time.monotonic() + seconds
        if self._has_lost and not self._heard:
            self.close()  # it may be back, or the way to it
        while True:
            if self._socket is None:
                self._socket = connect(self._address, me, until, seconds, is_wanted)
            if self._socket is None:
                return None
            keep_alive(self._socket, self._silence_seconds)
            try:
                self._socket.sendall(line_of({"kind": self._kind, **dataclasses.asdict(mine)}))
                line = self._read_line(until + SLACK, is_wanted)
            except OSError:
                line = b""
            if line is None:
                return None
            if line:
                return self._understand(line)
            self.close()
            if time.monotonic() > until:
                raise CoordinatorError(
                    f"{me} has heard nothing from {self._kind} 0 at {self._address} in "
                    f"{seconds:.0f} s. Is it another program that listens there?"
                )
            time.sleep(POLL_SECONDS)

    def _read_line(self, until: float, is_wanted: Condition) -> bytes | None:
        """The answer; empty if there is none, None if it is wanted no more."""
        assert self._socket is not None
        self._socket.settimeout(POLL_SECONDS)
        while b"\n" not in self._heard and self._heard[:1] in (b"", b"{"):
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
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _understand(self, line: bytes) -> Said:
        try:
            words = json.loads(line)
        except ValueError:
            raise CoordinatorError(
                f"at {self._address} listens something else than {self._kind} 0 of a job that "
                "begins: a job that has begun, or another program."
            ) from None
        if "error" in words:
            kind = CoordinatorError if words["is_missing"] else ProcessMismatchError
            raise kind(words["error"])
        if "said" not in words:
            raise CoordinatorError(f"{self._kind} 0 at {self._address} has gone.")
        return {int(number): says for number, says in words["said"].items()}


def connect(
    address: str, who: str, until: float, seconds: float, is_wanted: Condition = always
) -> socket.socket | None:
    """A connection, as soon as somebody listens there; None if it is wanted no more.

    Raises:
      CoordinatorError: If nobody does in time.
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
            what = who.partition(" ")[0]
            raise CoordinatorError(
                f"{who} cannot reach {what} 0 at {address}: {reason}, {tries} times in "
                f"{seconds:.0f} s. Does {what} 0 run there, is the port open, was every {what} "
                "told this address?"
            )
        time.sleep(POLL_SECONDS)
    return None
