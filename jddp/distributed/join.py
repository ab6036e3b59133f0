"""A process gets its devices, and joins its job within a time limit.

The identity is passed to `jax.distributed` explicitly; JAX's own detection is off. JAX would wait
five minutes for missing processes, then abort and print a page about its own tasks. Here processes
hold a rendezvous on the same port before JAX starts.
"""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from jddp.distributed.failure_file import VARIABLE as FAILURE_FILE
from jddp.distributed.gpus import OF_TPUS, Missing, has_tpu, may_use_gpus, why_missing
from jddp.distributed.identity import JOB, Identity, is_number, shown
from jddp.distributed.rendezvous import Member, RendezvousClient, RendezvousServer, connect_to
from jddp.ground.errors import ConfigError, DeviceError, report

START, HEARTBEAT = "JDDP_START_SECONDS", "JDDP_HEARTBEAT_SECONDS"
_DEFAULTS = {START: "300", HEARTBEAT: "100"}
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
VIRTUAL_DEVICES = 8
_IS_ON, _FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
_PLATFORMS = "jax_platforms"  # JAX_PLATFORMS, unless a program has set this option.


def initialize(identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
    """Joins the job, before devices are used, unless your code has joined it already.

    From then on this process ends with its job. An uncaught exception is written into the file of
    the first failure, if there is a job or JDDP_FAILURE_FILE is set. JAX's cache of compiled
    programs stays on if all processes share its folder.

    Raises:
      CoordinatorError: If processes are missing after JDDP_START_SECONDS.
      ProcessMismatchError: If two processes have the same number, or their counts, JDDP_JOB or
        JDDP_HEARTBEAT_SECONDS differ.
    """
    import jax

    from jddp.distributed.failure import keep_uncaught, watch_over_job

    if identity.coordinator is not None or environ.get(FAILURE_FILE):
        keep_uncaught(identity.process_id)
    if jax.distributed.is_initialized():
        watch_over_job()
    if identity.coordinator is None or jax.distributed.is_initialized():
        return
    # JAX's handler swallows SIGTERM in programs that do not query it. `requests` handles SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    seconds, heartbeat = (read_seconds(environ, name) for name in (START, HEARTBEAT))
    listens = None
    if identity.process_id == 0:
        listens = environ.get(_BIND) or bind_address(identity.coordinator)
    rendezvous(identity, listens, environ)
    jax.distributed.initialize(
        coordinator_address=identity.coordinator,
        num_processes=identity.num_processes,
        process_id=identity.process_id,
        local_device_ids=identity.local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=listens,
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=heartbeat,
    )
    watch_over_job()
    settle_address(identity.coordinator)
    use_if_shared()


def use_if_shared() -> None:
    """Switches JAX's cache of programs off unless all processes see a file of process 0 there.

    Every process of a job calls it, before it compiles anything. Every process reads the cache, and
    only process 0 writes it (on CPUs see `coordination.keep_own_programs`). If the others do not
    see its folder, at the next start they compile programs that process 0 finds there. XLA's
    autotuner on GPUs divides its work over all processes: they would wait, up to a day, for a
    process that does not compile.
    """
    import jax

    from jddp.distributed.coordination import BUSY_SECONDS, from_first, gather, process_index

    place = (getattr(jax.config, _FOLDER) or "") if getattr(jax.config, _IS_ON) else ""
    mark = place if "://" in place else ""
    with contextlib.ExitStack() as written:
        if process_index() == 0 and place and not mark:
            with contextlib.suppress(OSError):  # No process sees the file then.
                Path(place).mkdir(parents=True, exist_ok=True)
                file = written.enter_context(NamedTemporaryFile(dir=place, prefix=".jddp-"))
                mark = Path(file.name).name
        mark = from_first("cache/mark", mark, timeout_seconds=BUSY_SECONDS)
        sees = place == mark or (bool(mark and place) and Path(place, mark).exists())
        seen = gather("cache/seen", str(sees), timeout_seconds=BUSY_SECONDS)
    if (blind := seen.count("False")) == 0:
        return
    jax.config.update(_IS_ON, False)
    if process_index() == 0:
        report(
            f"the cache of compiled programs is off: {blind} of {len(seen)} processes do not see "
            f"the files of process 0 in {place}, and would wait for programs that it does not "
            "compile. Set XDG_CACHE_HOME to a directory that all of them share."
        )


def configure_devices(num_devices: int | str, *, num_processes: int = 1) -> None:
    """Sets the number of CPU devices, before JAX looks for any.

    Args:
      num_devices: Number of devices of all processes together; it overrides the environment.
        "auto" makes eight virtual CPU devices, unless the environment has a number; they are used
        only if there is no accelerator.
      num_processes: Number of processes of the job.

    Raises:
      ConfigError: If the devices do not divide over the processes.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    is_set = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in flags
    if num_devices == "auto" and is_set:
        return
    in_all = VIRTUAL_DEVICES if num_devices == "auto" else int(num_devices)
    if in_all % num_processes and num_devices != "auto":
        raise ConfigError(
            f"mesh.num_devices={in_all} does not divide over {num_processes} processes. "
            f"Choose a multiple of {num_processes}."
        )
    # Once the backend runs, JAX refuses an option, but would ignore a flag of XLA.
    jax.config.update("jax_num_cpu_devices", max(1, in_all // num_processes))


def require_devices() -> Missing | None:
    """Starts the devices of this process; in a job, after its processes have connected.

    Returns:
      The missing part, if JAX computes on CPUs although a driver or a plugin suggests a GPU.

    Raises:
      DeviceError: If JAX finds no device of the platform that it is to use, or no TPU where there
        is one.
    """
    import jax

    wanted = getattr(jax.config, _PLATFORMS)
    try:
        found = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        of_gpus = "Does nvidia-smi show it here, and is jax[cuda12] installed?"
        missing = (may_use_gpus(wanted) and why_missing()) or (
            OF_TPUS if "tpu" in (wanted or "") else of_gpus
        )
        raise DeviceError(
            f"JAX finds no device for JAX_PLATFORMS={wanted or '(not set)'}: "
            f"{reason.rstrip('.?')}. {missing} JAX_PLATFORMS=cpu computes without one."
        ) from error
    if found[0].platform == "cpu" and not wanted and has_tpu(os.environ):
        raise DeviceError(
            f"This host has TPUs, but JAX computes on CPUs. {OF_TPUS} JAX_PLATFORMS=cpu computes "
            "without them."
        )
    is_meant = found[0].platform != "cpu" or not may_use_gpus(wanted)
    return None if is_meant else why_missing()


def read_seconds(environ: Mapping[str, str], name: str) -> int:
    """The seconds that processes wait for each other: at the START, or for a HEARTBEAT.

    Raises:
      ConfigError: If the variable is not a positive number.
    """
    text = environ.get(name) or _DEFAULTS[name]
    if not is_number(text) or int(text) == 0:
        raise ConfigError(f"{name}={shown(text)} must be a positive number of seconds.")
    return int(text)


def rendezvous(identity: Identity, listens: str | None, environ: Mapping[str, str]) -> None:
    """Waits until all processes are there: then JAX may listen in process 0, or already listens.

    Args:
      identity: Identity of this process.
      listens: host:port on which process 0 listens; None for the others.
      environ: The environment.

    Raises:
      CoordinatorError: If processes are missing after the time limit.
      ProcessMismatchError: If two processes have the same number, or different settings.
    """
    assert identity.coordinator is not None
    coordinator = identity.coordinator
    seconds = read_seconds(environ, START)
    same = {JOB: environ.get(JOB, "not set"), HEARTBEAT: str(read_seconds(environ, HEARTBEAT))}
    mine = Member(identity.process_id, identity.num_processes, same)
    me = f"process {mine.number} of {mine.count}"
    if mine.number == 0:
        with contextlib.closing(RendezvousServer("process", coordinator, listens)) as server:
            # Process 0 resolves its own name now: JAX would try only twice a minute.
            connect_to(coordinator, me, time.monotonic() + seconds).close()
            server.gather(mine, seconds=seconds, is_last=True)
        return
    with contextlib.closing(RendezvousClient("process", coordinator)) as client:
        client.gather(mine, seconds=seconds)
    connect_to(coordinator, me, time.monotonic() + seconds).close()  # JAX listens now.


def bind_address(coordinator: str) -> str:
    """The address on which process 0 listens: the coordinator's interface only.

    JAX would listen on all interfaces, without authentication.

    Args:
      coordinator: host:port of process 0.

    Returns:
      address:port. It stands for all interfaces if the host's name is no name of loopback, but
      resolves to loopback on this machine: other hosts then use another address.
    """
    host, _, port = coordinator.rpartition(":")
    everywhere = f"[::]:{port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{port}"
    is_local_name = host in ("localhost", "[::1]") or host.startswith("127.")
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as here:
            here.bind(address)  # Any free port.
    except OSError:
        return everywhere
    if _is_loopback(str(address[0])) and not is_local_name:
        return everywhere  # No other host could connect to Debian's 127.0.1.1.
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"


def settle_address(coordinator: str) -> None:
    """Chooses the address at which gloo listens to connect CPU devices; all processes call it.

    gloo itself would take the address of the host's name. On Debian this is 127.0.1.1: no other
    host can reach it. In some containers there is no address. In these cases jddp chooses the
    address by which this host and process 0 reach each other.

    Args:
      coordinator: host:port of process 0; all processes are connected to it.
    """
    from jddp.distributed.coordination import gather, listen_at

    host, _, port = coordinator.rpartition(":")
    family, *_, there = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(there)  # This sends nothing.
        mine = route.getsockname()[0]
    # Process 0 may be on this host, and others reach it by another address.
    known = [mine, *gather("address", str(there[0]), timeout_seconds=60.0)]
    if leads_to_itself(socket.gethostname()):
        listen_at(next((address for address in known if not _is_loopback(address)), mine))


def leads_to_itself(name: str) -> bool:
    """Whether a name has no address, or a loopback address."""
    with contextlib.suppress(OSError):
        return _is_loopback(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
