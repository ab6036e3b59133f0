"""The launchers of several machines agree, before each attempt, on the machines that take part.

The launcher of node 0 listens at the coordinator's port as long as it runs, and the others stay
connected to it. The processes that they start connect at another port above this one.
"""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from jddp.distributed.failure_file import write_failure
from jddp.distributed.group import Launch, Place
from jddp.distributed.identity import JOB, loopback
from jddp.distributed.join import HEARTBEAT, START, bind_address, read_seconds
from jddp.distributed.rendezvous import Infos, Member, RendezvousClient
from jddp.distributed.rendezvous_server import RendezvousServer, listen
from jddp.ground.errors import CoordinatorError
from jddp.ground.typing import JsonObject

_NUM_PORTS = 64  # above the coordinator's port; one of them is free


class Nodes:
    """This machine's connection to the others, if there are any.

    Args:
      launch: The launch of this machine.
      environ: The environment.

    Raises:
      CoordinatorError: If node 0 cannot listen at the coordinator's port.
    """

    def __init__(self, launch: Launch, environ: Mapping[str, str] = os.environ):
        self._launch = launch
        self._seconds = read_seconds(environ, START)
        self._same = {JOB: environ.get(JOB, "not set")}
        self._end: RendezvousServer | RendezvousClient | None = None
        if launch.coordinator is not None and launch.num_nodes > 1:
            address = launch.coordinator
            silence = read_seconds(environ, HEARTBEAT)
            if launch.node_rank == 0:
                enough = self._is_enough if launch.min_processes else None
                about: JsonObject = {"silence_seconds": silence, "is_enough": enough}
                self._end = RendezvousServer("node", address, bind_address(address), **about)
            else:
                self._end = RendezvousClient("node", address, silence_seconds=silence)

    def gather(self) -> Place:
        """Waits for the other machines; returns the place of this one.

        Raises:
          CoordinatorError: If machines are missing after JDDP_START_SECONDS, or node 0 has left.
          ProcessMismatchError: If two machines have one rank, or different numbers or JDDP_JOB.
        """
        launch = self._launch
        info: JsonObject = {"processes": launch.num_processes}
        if launch.node_rank == 0:
            info |= {"coordinator": self._choose_port(), "job": secrets.token_hex(8)}
        infos: Infos = {0: info}
        if self._end is not None:
            mine = Member(launch.node_rank, launch.num_nodes, self._same, info)
            infos = self._end.gather(mine, seconds=self._seconds)
        numbers = {rank: info["processes"] for rank, info in infos.items()}
        first = sum(numbers[rank] for rank in numbers if rank < launch.node_rank)
        return Place(infos[0]["coordinator"], sum(numbers.values()), first, infos[0]["job"])

    def has_newcomer(self) -> bool:
        """Whether a machine waits for the next attempt: at node 0, of a job that may change."""
        may_change = self._launch.min_processes is not None
        return may_change and isinstance(self._end, RendezvousServer) and self._end.has_newcomer()

    def lost(self, failure_file: Path) -> list[int]:
        """Machines of this attempt that were lost; only node 0 is connected to all.

        Node 0 also writes a failure that another machine has sent, if the file has none.
        """
        end = self._end
        lost = self._end.lost() if self._end is not None else []
        if isinstance(end, RendezvousServer) and end.failure and not failure_file.exists():
            write_failure(end.failure, failure_file)
        return lost

    def send_failure(self, failure: JsonObject) -> None:
        """Sends node 0 the failure of an attempt: its processes may wait for one here."""
        if isinstance(self._end, RendezvousClient):
            self._end.send_failure(failure)

    def close(self, *, failed: bool) -> None:
        """Leaves the job; after a failure, the attempt of the other machines ends too."""
        if self._end is not None:
            self._end.say_goodbye(failed=failed)
            self._end.close()

    def _is_enough(self, infos: Infos) -> bool:
        return sum(x["processes"] for x in infos.values()) >= (self._launch.min_processes or 0)

    def _choose_port(self) -> str:
        """host:port at which the processes connect: a port of node 0 that is free now."""
        host, _, port = (self._launch.coordinator or f"{loopback()}:0").rpartition(":")
        above = range(int(port) + 1, min(int(port) + _NUM_PORTS, 2**16))
        *ports, last = above if self._launch.num_nodes > 1 else [int(port)]
        for number in ports:
            with suppress(CoordinatorError):
                return free_address(f"{host}:{number}")
        return free_address(f"{host}:{last}")


def free_address(address: str) -> str:
    """The address, with a free port for 0; raises a CoordinatorError if its port is taken."""
    with listen(bind_address(address)) as listening:
        return f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"
