"""Finds the number of this process in its job, from the variables of launchers, tried in order.

    identity = resolve_identity()

One small function for each launcher reads only the environment, and returns None if its launcher
has not started this process. It passes the names of its variables to `identify`, which checks
their values, so that all launchers report mistakes in the same way. JAX's own detection is not
used: it mistakes a notebook inside a Slurm allocation for a job, and Open MPI's launcher for the
first process.

MPI is tried before Slurm: `mpirun` inside an allocation starts its daemons as a step of Slurm, and
its processes inherit the numbers of this step.
"""

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jddp.distributed.exits import in_shell
from jddp.ground.errors import ConfigError

Environ = Mapping[str, str]
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
ADDRESS, COUNT, ID = VARIABLES
JOB = "JDDP_JOB"  # An identifier of the job, the same for all its processes.
# One variable of NVIDIA and two of AMD: HIP chooses among the GPUs that ROCR leaves.
NVIDIA = "CUDA_VISIBLE_DEVICES"
VISIBLE = (NVIDIA, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
FIRST_PORT = 61440  # The ports that Linux assigns by itself are lower.
NUM_PORTS = 4096
LAUNCHED = "JDDP_LAUNCHED"  # Set by jddp: JAX's variables count under any scheduler.
LOOPBACK = "127.0.0.1"
KUBERNETES_PORT = 8476  # Each pod has its own address.


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
    """

    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    local_device_ids: tuple[int, ...] | None = None
    source: str = field(default="", compare=False)

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
      local_id: Variable with the number of this process among the processes on this host.
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
    """The identity in the variables of these names; the only task of a scheduler is alone.

    Args:
      environ: The environment.
      names: Names of the variables.
      address: Function that finds host:port of process 0, if it can; JAX's variable for that wins.
      source: Launcher that has set the numbers.

    Returns:
      None if none of the variables is set, or only the numbers of a job of one process: some
      containers set these.

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
    return Identity(coordinator, int(count), int(number), devices, source)


def visible_in(environ: Environ) -> str:
    """The variable that lists the visible GPUs; NVIDIA's if none is set."""
    return next((name for name in VISIBLE if name in environ), NVIDIA)


def port_of(job: str) -> int:
    """A port: the same for all processes of a job, and probably different for another job."""
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def choose_local_devices(environ: Environ, names: Names) -> tuple[int, ...] | None:
    """Numbers of this process's accelerators, among those that it sees; None if it has them all.

    The processes of a host share its visible accelerators evenly: one each if the list, or the
    number of processes, is not set. A process keeps accelerators that a scheduler gives only to it.

    Raises:
      ConfigError: If there are more processes than accelerators.
    """
    local_id, num_local = environ.get(names.local_id, ""), environ.get(names.num_local, "")
    if not is_number(local_id) or num_local == "1" or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None  # JAX reads JAX_LOCAL_DEVICE_IDS.
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


Resolver = Callable[[Environ], Identity | None]
_POD = "JOB_COMPLETION_INDEX"
_MASTER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_LOCAL = ("LOCAL_WORLD_SIZE", "LOCAL_RANK")
TORCHRUN = Names("WORLD_SIZE", "RANK", *_LOCAL, _MASTER, "MASTER_ADDR:MASTER_PORT")
_OMPI = "OMPI_COMM_WORLD_"
OPEN_MPI = Names(_OMPI + "SIZE", _OMPI + "RANK", _OMPI + "LOCAL_SIZE", _OMPI + "LOCAL_RANK")
MPICH = Names("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
SLURM = Names("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID")
# Variables with the number of processes and of this process; schedulers from the third pair on.
TPUS = Names("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
_SLICES = {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}
TPU_PORT = 8482  # JAX's own for slices, whose hosts have their own addresses.
NUMBERS = ((COUNT, ID), *(x[:2] for x in (TORCHRUN, OPEN_MPI, MPICH, SLURM)), (COUNT, _POD))


def resolve_identity(
    environ: Environ = os.environ, *, is_interactive: bool | None = None
) -> Identity:
    """Finds the number of this process, and its job, from the environment.

    The first launcher that has set its variables decides: jddp's own, JAX's variables, torchrun,
    Open MPI, MPICH, a step of Slurm, an Indexed Job of Kubernetes, a slice of TPUs. If none has,
    this process is alone.

    Args:
      environ: The environment.
      is_interactive: Whether a user types here, as in a notebook: then schedulers are ignored.
        Detected if None.

    Raises:
      ConfigError: If numbers are incomplete or out of range.
    """
    if is_interactive is None:
        is_interactive = in_shell(environ)
    half_set = None
    for source in (jax_variables, torchrun, *(() if is_interactive else SCHEDULERS)):
        try:
            if (identity := source(environ)) is not None:
                return identity
        except HalfSetError as error:
            half_set = half_set or error
    if half_set is not None:
        raise half_set
    is_in_slurm = environ.get("SLURM_JOB_ID")
    return Identity(source="Slurm, without a step of several tasks" if is_in_slurm else "")


def jax_variables(environ: Environ) -> Identity | None:
    """A process of jddp's launcher, also on Ray, or of Kubeflow: they set JAX's three variables."""
    names = Names(COUNT, ID, needed=VARIABLES)
    return identify(environ, names, lambda: None, environ.get(LAUNCHED) or COUNT)


def torchrun(environ: Environ) -> Identity | None:
    """A process of torchrun, or of another launcher that sets the same variables.

    torchrun itself listens on MASTER_PORT, and keeps that port over restarts.
    """
    if environ.get("WORLD_SIZE", "1") == "1" and not environ.get("RANK"):
        return None

    def address() -> str:
        port = environ["MASTER_PORT"]
        if run := environ.get("TORCHELASTIC_RUN_ID"):
            port = str(port_of(f"{port}/{run}/{environ.get('TORCHELASTIC_RESTART_COUNT', '')}"))
        return f"{environ['MASTER_ADDR']}:{port}"

    return identify(environ, TORCHRUN, address, "torchrun")


def open_mpi(environ: Environ) -> Identity | None:
    """A process of Open MPI's mpirun, version 4 or 5: they set different variables."""
    uri, space = environ.get("OMPI_MCA_orte_hnp_uri", ""), environ.get("PMIX_NAMESPACE", "")
    job = uri.partition(".")[0] or space

    def address() -> str | None:
        if environ.get(OPEN_MPI.num_local) == environ[OPEN_MPI.num_processes] and job:
            return f"{LOOPBACK}:{port_of(job)}"
        if first := _first_of_slurm(environ):
            return first
        # The daemons are numbered, and the launcher has 0. mpirun ends the other processes.
        daemon = re.match(r"[^;]*\.(\d+);", environ.get("PMIX_SERVER_URI2", ""))
        if daemon and daemon[1] != "0" and environ[OPEN_MPI.process_id] == "0":
            here = f"{environ.get('PMIX_HOSTNAME', socket.gethostname())}:{port_of(job)}"
            raise ConfigError(
                f"mpirun and process 0 run on different hosts: give mpirun -x {ADDRESS}={here}, so "
                "that all processes find process 0."
            )
        launcher = re.search(r"tcp://([\d.]+)", uri) or re.match(r"prte(?:run)?-(.+)-\d+@", space)
        return f"{launcher[1]}:{port_of(job)}" if launcher else None

    return identify(environ, OPEN_MPI, address, "Open MPI")


def mpich(environ: Environ) -> Identity | None:
    """A process of MPICH's or Intel's mpiexec: neither gives the address of process 0."""
    pairs = zip(MPICH[:2], SLURM[:2], strict=True)
    if all(environ.get(ours) == environ.get(theirs) for ours, theirs in pairs):
        return None  # srun sets these variables too, and has more of its own.
    return identify(environ, MPICH, lambda: _first_of_slurm(environ), "MPICH")


def slurm(environ: Environ) -> Identity | None:
    """A task of a step; a batch script or a shell inside an allocation is none."""
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not (environ.get("SLURM_JOB_ID") and nodes):
        return None
    environ_of_step = {**environ, SLURM.num_local: _num_sharing(environ)}
    # Slurm sorts the hosts of a step, and numbers tasks in that order. Each step has its port.
    step = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return identify(environ_of_step, SLURM, lambda: f"{first_host(nodes)}:{port_of(step)}", "Slurm")


def kubernetes(environ: Environ) -> Identity | None:
    """A pod of an Indexed Job: it knows its index, and the manifest must set the number of pods.

    The first pod has the same name with index 0: `job-0.a.b` for `job-3.a.b`.
    """
    index = environ.get(_POD, "")
    if not (index and environ.get(COUNT)):
        return None  # An array of jobs with one process each.

    def address() -> str | None:
        host, _, domain = socket.getfqdn().partition(".")
        first = f"{host.removesuffix(index)}0.{domain}"
        return f"{first}:{KUBERNETES_PORT}" if domain and host.endswith(f"-{index}") else None

    return identify(environ, Names(COUNT, _POD), address, "an Indexed Job")


def cloud_tpu(environ: Environ) -> Identity | None:
    """A host of a slice of TPUs on GKE; the hosts of several slices are numbered one after another.

    A slice of one host, whose only name is often "localhost", is a job of one process.
    """
    hosts, worker = (environ.get(name, "") for name in TPUS[:2])
    num, here = (environ.get(name) or value for name, value in _SLICES.items())
    names = hosts.split(",")
    if not hosts or (len(names) == 1 and num == "1"):
        return None
    if all(map(is_number, (num, here, worker))):
        number = int(here) * len(names) + int(worker)
        environ = {**environ, TPUS[0]: str(int(num) * len(names)), TPUS[1]: str(number)}
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") or names[0]
    return identify(environ, TPUS, lambda: f"{first.split(':')[0]}:{TPU_PORT}", "a slice of TPUs")


SCHEDULERS: tuple[Resolver, ...] = (open_mpi, mpich, slurm, kubernetes, cloud_tpu)


def first_host(nodes: str) -> str:
    """The first host of a list of Slurm, which is sorted: `n9` of `n[9-10],m1`."""
    first, *_ = re.split(r",(?![^\[]*\])", nodes)  # Commas outside of brackets.
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _first_of_slurm(environ: Environ) -> str | None:
    """Address of mpirun's first process; the step of its daemons may leave out that host."""
    nodes = environ.get("SLURM_JOB_NODELIST")
    job = environ.get("SLURM_JOB_ID")
    return f"{first_host(nodes)}:{port_of(f'{job}.')}" if nodes and job else None


def _num_sharing(environ: Environ) -> str:
    """Number of tasks that share the visible devices: this host's entry in `2(x3),1`."""
    visible = environ.get(visible_in(environ), "")
    there = environ.get("SLURM_GPUS_ON_NODE", "")
    if visible and is_number(there) and len(visible.split(",")) < int(there):
        return "1"  # Slurm has applied --gpus-per-task or --gpu-bind.
    per_node = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get(SLURM.num_local, ""))
    counts = [count for count, times in per_node for _ in range(int(times or 1))]
    return dict(enumerate(counts)).get(int(environ.get("SLURM_NODEID") or 0), "")
