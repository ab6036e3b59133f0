"""The identity of a process in its job, from the environment that its launcher sets.

A source passes the names of its variables; their values are checked here, so that
all sources report mistakes in the same way. Nothing here knows a scheduler.
"""

import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jddp.ground.errors import ConfigError

Environ = Mapping[str, str]
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
ADDRESS, COUNT, ID = VARIABLES
JOB = "JDDP_JOB"  # an identifier of the job, the same for all its processes
# Of NVIDIA, and two of AMD: HIP chooses among those that ROCR leaves.
CUDA, HIP, ROCR = (f"{runtime}_VISIBLE_DEVICES" for runtime in ("CUDA", "HIP", "ROCR"))
FIRST_PORT = 61440  # above the ports that Linux assigns by itself
NUM_PORTS = 4096


@dataclass(frozen=True)
class Identity:
    """One process of a job.

    Attributes:
      coordinator: host:port of process 0, or None for a job of one process.
      num_processes: Number of processes of the job.
      process_id: Number of this process, from 0.
      local_device_ids: Numbers of this process's accelerators among all accelerators of the host;
        None for all that it sees.
      source: Launcher that has set the numbers; empty if there is none.
      count_in: Variable with the number of processes; empty if there is none.
    """

    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    local_device_ids: tuple[int, ...] | None = None
    source: str = field(default="", compare=False)
    count_in: str = field(default="", compare=False)

    def __str__(self) -> str:
        """One line: the numbers, and the launcher that has set them."""
        processes = "process" if self.num_processes == 1 else "processes"
        text = f"{self.num_processes} {processes}, set by {self.source}"
        if self.coordinator is not None:
            text += f"; process {self.process_id}; coordinator {self.coordinator}; "
            ids = ", ".join(map(str, self.local_device_ids or ()))
            text += f"local devices {ids}" if ids else "every local device"
        return text


class HalfSetError(ConfigError):
    """A source sets only some of its variables; another source may set all."""


class Names(NamedTuple):
    """Names of the variables of one source.

    Attributes:
      num_processes: Variable with the number of processes.
      process_id: Variable with the number of this process.
      num_local: Variable with the number of processes on this host.
      local_id: Variable with the number of this process among those on this host.
      needed: All variables that the source needs, if it needs more than the first two.
      address: Name of the address of process 0, for messages.
    """

    num_processes: str
    process_id: str
    num_local: str = ""
    local_id: str = ""
    needed: tuple[str, ...] = ()
    address: str = ADDRESS


def is_number(text: str) -> bool:
    """Whether a text is a whole number from 0 up, of at most nine digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 9


def shown(text: str) -> str:
    """The value of a variable for a message: quoted, and shortened."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def loopback() -> str:
    """The loopback address of this host: 127.0.0.1, or [::1] if it has no other."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
            here.bind(("127.0.0.1", 0))
    except OSError:
        return "[::1]"
    return "127.0.0.1"


def check_address(address: str, name: str) -> str:
    """Returns an address if it is host:port, with an IPv6 address in brackets.

    Raises:
      ConfigError: If it is not.
    """
    host, _, port = address.rpartition(":")
    if not (all(host.removesuffix(".").split(".")) and is_number(port) and 0 < int(port) < 2**16):
        raise ConfigError(
            f"{name}={shown(address)} must be host:port, such as node-0:1234, of process 0."
        )
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else address


def identify(
    environ: Environ, names: Names, address: Callable[[], str | None], source: str
) -> Identity | None:
    """The identity that the variables of these names describe; a scheduler's only task is alone.

    Args:
      environ: The environment.
      names: Names of the variables.
      address: Function that finds host:port of process 0, if it can; JAX's variable for that wins.
      source: Launcher that has set the numbers.

    Returns:
      None if none of the variables is set, or only the numbers of a job of one process, which
      some containers set.

    Raises:
      HalfSetError: If only some are set.
      ConfigError: If the numbers or the address break their rules.
    """
    there = names.num_processes
    here = names.process_id
    needed = names.needed or names[:2]
    if not (are_set := [name for name in needed if environ.get(name)]):
        return None
    if missing := [name for name in needed if name not in are_set]:
        if (environ.get(there), environ.get(here)) == ("1", "0"):
            return None
        raise HalfSetError(
            f"{', '.join(are_set)} set but {', '.join(missing)} not. A job of many processes needs "
            f"all {len(needed)} variables; a job of one process needs none."
        )
    count = environ[there]
    number = environ[here]
    given = environ.get(ADDRESS)
    if not (is_number(count) and is_number(number)):
        raise ConfigError(f"{there}={shown(count)} and {here}={shown(number)} must be numbers.")
    if int(number) >= int(count):
        raise ConfigError(f"{here}={number} must be below {there}={count}.")
    if int(count) == 1 and here != ID:
        return Identity(source=source)
    if (coordinator := given or address()) is None:
        raise ConfigError(
            f"{source} does not give the address of process 0: set {ADDRESS} to host:port on the "
            "host of process 0, for all processes."
        )
    coordinator = check_address(coordinator, ADDRESS if given else names.address)
    devices = choose_local_devices(environ, names)
    return Identity(coordinator, int(count), int(number), devices, source, there)


def visible_in(environ: Environ, default: str = CUDA) -> str:
    """The variable that lists the visible GPUs; `default` if none is set."""
    return next((name for name in (CUDA, HIP, ROCR) if name in environ), default)


def port_of(job: str) -> int:
    """A port: the same for all processes of a job, and probably another one for another job."""
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def choose_local_devices(environ: Environ, names: Names) -> tuple[int, ...] | None:
    """Numbers of this process's accelerators, among those that it sees; None if it has them all.

    The processes of a host share its visible accelerators evenly: one each if the list, or the
    number of processes, is not set. A process keeps those that a scheduler has given to it alone.

    Raises:
      ConfigError: If there are more processes than accelerators.
    """
    local_id, num_local = environ.get(names.local_id, ""), environ.get(names.num_local, "")
    if not is_number(local_id) or num_local == "1" or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None  # JAX reads JAX_LOCAL_DEVICE_IDS
    variable = visible_in(environ)
    visible = [x for x in environ.get(variable, "").split(",") if x.strip()]
    if len(visible) == 1 or environ.get("JAX_PLATFORMS") == "cpu":
        return None
    is_shared = bool(visible) and is_number(num_local) and int(num_local) > 0
    share = len(visible) // int(num_local) if is_shared else 1
    if share == 0:
        raise ConfigError(
            f"{names.num_local}={num_local} processes on this host, and "
            f"{variable}={environ[variable]} for them: start no more processes than there are "
            "devices."
        )
    return tuple(range(int(local_id) * share, (int(local_id) + 1) * share))
