"""A TCP connection on which each message is a line, an object of JSON, within a time limit.

connection.send({"kind": "process"})
connection.receive(seconds=5)        # the next message, or an error when the time is over
connection.arrived()                 # the messages that are complete by now; does not wait
"""

import contextlib
import json
import socket
import time

from jddp.typing import JsonObject

_LONGEST = 2**20  # bytes of a message
_CHUNK = 2**16
_SEND_SECONDS = 5.0
_PROBES = 4  # unanswered probes, after which a connection is lost


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
