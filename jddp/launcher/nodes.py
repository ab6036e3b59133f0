"""Launchers of several machines agree, before each attempt, on who takes part.

That of node 0 listens at the coordinator's port as long as it lives, and the others stay connected
to it. The processes they start meet at another port above that one.
"""

import os
import secrets
from collections.abc import Mapping

from jddp.distributed.connect import HEARTBEAT, START, bind_address, read_seconds
from jddp.distributed.identity import JOB, check_address
from jddp.distributed.rendezvous import Condition, Member, Said
from jddp.distributed.rendezvous_client import Caller
from jddp.distributed.rendezvous_server import Roll, listen
from jddp.errors import CoordinatorError
from jddp.launcher.workers import Launch, Place

LOCAL = "127.0.0.1"
PATIENCE_SECONDS = 30.0  # for further machines, once there are enough
_NUM_PORTS = 64  # above the coordinator's, of which one is free


class Nodes:
    """This machine's end of it; a machine that is alone asks nobody.

    Args:
      launch: Of this machine.
      environ: The environment.

    Raises:
      ConfigError: If the coordinator is not host:port.
      CoordinatorError: If node 0 cannot listen there.
    """

    def __init__(self, launch: Launch, environ: Mapping[str, str] = os.environ):
        self._launch = launch
        self._seconds = read_seconds(environ, START)
        self._same = {JOB: environ.get(JOB, "not set")}
        silence = read_seconds(environ, HEARTBEAT)
        self._roll: Roll | None = None
        self._caller: Caller | None = None
        if launch.coordinator is not None and launch.num_nodes > 1:
            address = check_address(launch.coordinator, "--coordinator")
            if launch.node_rank == 0:
                self._roll = Roll("node", address, bind_address(address), silence_seconds=silence)
            else:
                self._caller = Caller("node", address, silence_seconds=silence)

    def gather(self, is_wanted: Condition) -> Place | None:
        """Waits for the others; None if that is wanted no more.

        Raises:
          CoordinatorError: If they do not come in JDDP_START_SECONDS, or node 0 has gone.
          ProcessMismatchError: If two are the same node, or were told other numbers.
        """
        launch = self._launch
        mine = Member(launch.node_rank, launch.num_nodes, self._same, self._words())
        said: Said | None = {0: mine.says}
        if self._roll is not None:
            said = self._roll.gather(
                mine,
                seconds=self._seconds,
                is_wanted=is_wanted,
                is_enough=self._is_enough if launch.min_processes else None,
                patience_seconds=PATIENCE_SECONDS,
            )
        elif self._caller is not None:
            said = self._caller.gather(mine, seconds=self._seconds, is_wanted=is_wanted)
        if said is None:
            return None
        numbers = {rank: said[rank]["processes"] for rank in sorted(said)}
        return Place(
            coordinator=said[0]["coordinator"],
            num_processes=sum(numbers.values()),
            first=sum(number for rank, number in numbers.items() if rank < launch.node_rank),
            job=said[0]["job"],
        )

    def has_newcomer(self) -> bool:
        """Whether, at node 0 of a job that may change, a machine waits for the next attempt."""
        if self._roll is None or self._launch.min_processes is None:
            return False
        return self._roll.has_newcomer()

    def lost(self) -> list[int]:
        """Machines of this attempt that have gone without a word; only node 0 hears of all."""
        end = self._roll or self._caller
        return end.lost() if end is not None else []

    def close(self, *, failed: bool) -> None:
        """Leaves; if with a failure, the attempt of the others ends too."""
        end = self._roll or self._caller
        if end is not None:
            end.say_goodbye(failed=failed)
            end.close()

    def _is_enough(self, said: Said) -> bool:
        assert self._launch.min_processes is not None
        return sum(says["processes"] for says in said.values()) >= self._launch.min_processes

    def _words(self) -> dict[str, object]:
        words: dict[str, object] = {"processes": self._launch.num_processes}
        if self._launch.node_rank == 0:
            words |= {"coordinator": self._choose_port(), "job": secrets.token_hex(8)}
        return words

    def _choose_port(self) -> str:
        """Where the processes meet: a port of node 0 that is free now."""
        launch = self._launch
        host, _, port = (launch.coordinator or f"{LOCAL}:0").rpartition(":")
        ports = range(int(port), int(port) + 1)
        if launch.num_nodes > 1:
            ports = range(int(port) + 1, min(int(port) + _NUM_PORTS, 2**16))
        for number in ports:
            address = f"{host}:{number}"
            try:
                with listen(bind_address(address)) as free:
                    return f"{host}:{free.getsockname()[1]}"
            except CoordinatorError:
                if number == ports[-1]:
                    raise
        raise AssertionError
