"""Processes meet within a time limit, or somebody says what did not happen.

JAX waits five minutes and aborts, with a page about its own tasks. Here who cannot reach process 0
says so, with address and reason, and who waits for others in vain says that.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from jddp.cluster.identity import Identity
from jddp.errors import ConfigError, CoordinatorError

SECONDS = "JDDP_START_SECONDS"
_DEFAULT = "300"
_BETWEEN_TRIES = 0.2


def start_seconds(environ: Mapping[str, str]) -> float:
    """How long processes wait for each other.

    Raises:
      ConfigError: If that is not a positive number.
    """
    told = environ.get(SECONDS) or _DEFAULT
    if not told.isdecimal() or int(told) == 0:
        raise ConfigError(f"{SECONDS}={told!r} must be a positive number of seconds.")
    return float(told)


def reach(identity: Identity, seconds: float) -> None:
    """Waits until process 0 listens.

    Raises:
      CoordinatorError: If it cannot be reached.
    """
    assert identity.coordinator is not None
    host, _, port = identity.coordinator.rpartition(":")
    until, tries = time.monotonic() + seconds, 0
    while True:
        tries += 1
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > until:
            raise CoordinatorError(
                f"process {identity.process_id} of {identity.num_processes} cannot reach process 0 "
                f"at {identity.coordinator}: {reason}, {tries} times in {seconds:.0f} s. Does "
                f"process 0 run there, is the port open, was every process told this address?"
            )
        time.sleep(_BETWEEN_TRIES)


@contextlib.contextmanager
def time_limit(identity: Identity, seconds: float) -> Iterator[None]:
    """While open, ends this process when the time is over: what it waits for cannot be broken off.

    JAX ends it as well, a little later, with an abort.
    """
    timer = threading.Timer(seconds, _give_up, (identity, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(identity: Identity, seconds: float) -> None:
    print(
        f"jddp: not all of {identity.num_processes} processes have come to {identity.coordinator} "
        f"within {seconds:.0f} s; this is process {identity.process_id}. Was every process "
        "started, with a number of its own?",
        file=sys.stderr,
        flush=True,
    )
    os._exit(CoordinatorError.exit_code)
