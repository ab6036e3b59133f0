"""Finds which process of a job this is: one small function for each launcher, tried in order.

Each reads the environment and nothing else, and returns None where it has not started this process.
JAX's own detection is not used: it takes a notebook inside a Slurm allocation for a job, and Open
MPI's launcher for the first process.

MPI is tried before Slurm, since `mpirun` inside an allocation starts its daemons as a step of
Slurm, whose numbers its processes inherit.
"""

import os
from collections.abc import Callable, Mapping

from jddp.distributed.identity import (
    ADDRESS,
    COUNT,
    ID,
    VARIABLES,
    HalfSetError,
    Identity,
    Names,
    check_address,
    make_identity,
    port_of,
    require,
)
from jddp.distributed.schedulers import kubernetes, mpich, open_mpi, slurm
from jddp.distributed.signals import is_at_prompt
from jddp.errors import ConfigError

Environ = Mapping[str, str]
Source = Callable[[Environ], Identity | None]
LAUNCHED = "JDDP_LAUNCHED"  # by jddp: its variables are JAX's, whatever is around it
TORCHRUN = Names("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


def resolve_identity(
    environ: Environ = os.environ,
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    is_interactive: bool | None = None,
) -> Identity:
    """Finds out which process of which job this is.

    The three arguments win over everything. Then the first launcher that has set its variables:
    jddp's own, JAX's variables, torchrun, Open MPI, MPICH, a step of Slurm, an Indexed Job of
    Kubernetes. Where none has, this process is alone.

    Args:
      environ: The environment.
      coordinator: host:port of process 0.
      num_processes: Number of processes of the job.
      process_id: Number of this process.
      is_interactive: Whether a user types here, as in a notebook: then schedulers are ignored.
        Detected if None.

    Raises:
      ConfigError: If numbers are incomplete, out of range or contradictory.
    """
    given = (coordinator, num_processes, process_id)
    if None not in given:
        numbers = {"num_processes": str(num_processes), "process_id": str(process_id)}
        address = check_address(str(coordinator), "coordinator")
        return make_identity(numbers, Names(*numbers), lambda: address, "the arguments")
    overlay = {n: str(x) for n, x in zip(VARIABLES, given, strict=True) if x is not None}
    environ = {**environ, **overlay}
    if is_interactive is None:
        # At a prompt, in a notebook, or in the shell of `srun --pty`.
        is_in_pty = bool(environ.get("SLURM_PTY_PORT")) and os.isatty(0)
        is_interactive = is_at_prompt() or is_in_pty
    half_set = None
    for source in LAUNCHERS if is_interactive else SOURCES:
        try:
            identity = source(environ)
        except HalfSetError as error:
            half_set = half_set or error
            continue
        if identity is not None:
            _refuse_contradiction(identity, environ)
            return identity
    if half_set is not None:
        raise half_set
    is_in_slurm = environ.get("SLURM_JOB_ID")
    return Identity(source="Slurm, without a step of several tasks" if is_in_slurm else "")


def jddp_launch(environ: Environ) -> Identity | None:
    """A process of `python -m jddp.launch`, by itself or on Ray, which has split the devices."""
    if not environ.get(LAUNCHED):
        return None
    return _of_three(environ, environ[LAUNCHED])


def jax_variables(environ: Environ) -> Identity | None:
    """The three variables, of which JAX itself reads one; Kubeflow's JAX runtime sets them."""
    if not any(environ.get(name) for name in VARIABLES):
        return None
    found = _of_three(environ, COUNT)
    for source in SOURCES[2:]:
        _refuse_other_numbers(found, source, environ)
    return found


def torchrun(environ: Environ) -> Identity | None:
    """The variables of torchrun, and of other launchers that set the same.

    torchrun itself listens on MASTER_PORT, and keeps that port over restarts.
    """
    if environ.get("WORLD_SIZE", "1") == "1" and not environ.get("RANK"):
        return None
    require(environ, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    port = environ["MASTER_PORT"]
    if environ.get("TORCHELASTIC_RUN_ID"):
        run = [environ.get(f"TORCHELASTIC_{x}", "") for x in ("RUN_ID", "RESTART_COUNT")]
        port = str(port_of("/".join([port, *run])))
    address = check_address(f"{environ['MASTER_ADDR']}:{port}", "MASTER_ADDR:MASTER_PORT")
    return make_identity(environ, TORCHRUN, lambda: address, "torchrun")


LAUNCHERS: tuple[Source, ...] = (jddp_launch, jax_variables, torchrun)
SOURCES = (*LAUNCHERS, open_mpi, mpich, slurm, kubernetes)


def _of_three(environ: Environ, source: str) -> Identity:
    require(environ, VARIABLES)
    return make_identity(environ, Names(COUNT, ID), lambda: environ[ADDRESS], source)


def _refuse_other_numbers(found: Identity, source: Source, environ: Environ) -> None:
    """Refuses numbers of JAX's variables that contradict those of the scheduler.

    A job may have more processes than its scheduler has tasks, if each task starts several; but it
    cannot have fewer, and of as many each has its own number.
    """
    others = {name: value for name, value in environ.items() if name not in (COUNT, ID)}
    try:
        other = source(others)
    except ConfigError:
        return
    if other is None or other.num_processes == 1:
        return
    is_other = other.num_processes == found.num_processes and other.process_id != found.process_id
    if is_other or other.num_processes > found.num_processes:
        raise ConfigError(
            f"{COUNT}={found.num_processes} and {ID}={found.process_id}, but {other.source} has "
            f"started process {other.process_id} of {other.num_processes}. Unset {COUNT} and {ID}, "
            "or give each process its own."
        )


def _refuse_contradiction(found: Identity, environ: Environ) -> None:
    """Refuses single variables of JAX that contradict the launcher."""
    for name, number in ((COUNT, found.num_processes), (ID, found.process_id)):
        if environ.get(name) and environ[name] != str(number):
            raise ConfigError(
                f"{name}={environ[name]}, but {found.source} has set {number}. Unset {name}, or "
                "start that many processes."
            )
