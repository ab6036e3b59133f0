"""The identity of a process in its job, from the environment that its launcher sets.

A source passes the numbers that it found and the names of its variables; here they are checked, so
that the mistakes of all sources read alike. Nothing here knows a scheduler.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jddp.errors import ConfigError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
ADDRESS, COUNT, ID = VARIABLES
JOB = "JDDP_JOB"  # the same word for all processes of a job, and another for each job
FIRST_PORT, NUM_PORTS = 61440, 4096  # above those that Linux hands out by itself


@dataclass(frozen=True)
class Identity:
    """One process of a job.

    Attributes:
      coordinator: host:port of process 0, or None for a job of one process.
      num_processes: Number of processes of the job.
      process_id: Number of this process, from 0.
      local_device_ids: Those of the host's accelerators that are this process's; None for all it
        sees.
      source: Launcher that has set the numbers; empty where there is none.
    """

    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    local_device_ids: tuple[int, ...] | None = None
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        """One line: the numbers, and the launcher that has set them."""
        plural = "es" * (self.num_processes > 1)
        parts = [f"{self.num_processes} process{plural}, set by {self.source}"]
        if self.coordinator is not None:
            parts += [f"process {self.process_id}", f"coordinator {self.coordinator}"]
            ids = ", ".join(map(str, self.local_device_ids or ()))
            parts += [f"local devices {ids}" if ids else "every local device"]
        return "; ".join(parts)


class HalfSetError(ConfigError):
    """A source sets only some of its variables; another source may set all."""


@dataclass(frozen=True)
class Names:
    """Names of the variables of one source.

    Attributes:
      num_processes: Variable with the number of processes.
      process_id: Variable with the number of this process.
      num_local: Variable with the number of processes on this host.
      local_id: Variable with the number of this process among those on this host.
    """

    num_processes: str
    process_id: str
    num_local: str = ""
    local_id: str = ""


def require(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Refuses variables of which only some are set.

    Raises:
      HalfSetError: If one is not set, or empty.
    """
    missing = [name for name in names if not environ.get(name)]
    if missing:
        given = ", ".join(name for name in names if environ.get(name)) or "nothing"
        raise HalfSetError(
            f"{given} set but {', '.join(missing)} not. A job of many processes needs "
            f"all {len(names)}; a job of one needs none."
        )


def check_address(address: str, name: str) -> str:
    """Returns an address if it is host:port.

    Raises:
      ConfigError: If it is not.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"{name}={address!r} must be host:port, such as node-0:1234, of process 0."
        )
    return address


def make_identity(
    environ: Mapping[str, str], names: Names, address: Callable[[], str], source: str
) -> Identity:
    """An identity from the numbers under these names; a scheduler's only task is alone.

    Args:
      environ: The environment.
      names: Names of the variables.
      address: Function that finds host:port of process 0, unless JAX's variable for that is set.
      source: Launcher that has set the numbers.

    Raises:
      HalfSetError: If one of both numbers is not set.
      ConfigError: If the numbers or the address break their rules.
    """
    there, here = names.num_processes, names.process_id
    require(environ, (there, here))
    count, number, given = environ[there], environ[here], environ.get(ADDRESS)
    if not (count.isdecimal() and number.isdecimal()):
        raise ConfigError(f"{there}={count!r} and {here}={number!r} must be numbers.")
    if int(number) >= int(count):
        raise ConfigError(f"{here}={number} must be below {there}={count}.")
    if int(count) == 1 and here != ID:
        return Identity(source=source)
    coordinator = check_address(given, ADDRESS) if given else address()
    devices = choose_local_devices(environ, names)
    return Identity(coordinator, int(count), int(number), devices, source)


def port_of(job: str) -> int:
    """A port that all processes of a job compute, and another job is unlikely to."""
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def choose_local_devices(environ: Mapping[str, str], names: Names) -> tuple[int, ...] | None:
    """Accelerators of this process, of those it sees, where it shares them with others.

    The processes of a host share the visible ones evenly, which is one each if their number is not
    set. Those that a scheduler has given to this process alone are not shared.

    Raises:
      ConfigError: If there are more processes than accelerators.
    """
    local_id, num_local = environ.get(names.local_id, ""), environ.get(names.num_local, "")
    if not local_id.isdecimal() or num_local == "1" or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None  # JAX reads the last one
    visible = [x for x in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.strip()]
    if len(visible) == 1 or environ.get("JAX_PLATFORMS") == "cpu":
        return None
    if not (visible and num_local.isdecimal()):
        return (int(local_id),)
    share = len(visible) // int(num_local)
    if share == 0:
        raise ConfigError(
            f"{names.num_local}={num_local} processes on this host, and "
            f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} for them: start no more "
            "processes than there are devices."
        )
    return tuple(range(int(local_id) * share, (int(local_id) + 1) * share))
