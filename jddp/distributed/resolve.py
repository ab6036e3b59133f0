"""Finds which process of a job this is: one small function for each launcher, tried in order.

JAX's own detection is not used: it mistakes a notebook inside a Slurm allocation for a job, and
Open MPI's launcher for the first process.
"""

import contextlib
import os

from jddp.distributed.exits import is_at_prompt
from jddp.distributed.identity import VARIABLES, Environ, HalfSetError, Identity, Names, identify
from jddp.distributed.schedulers import SCHEDULERS, Resolver, torchrun
from jddp.errors import ConfigError

_, COUNT, ID = VARIABLES
LAUNCHED = "JDDP_LAUNCHED"  # by jddp: JAX's variables count, whatever scheduler is around


def resolve_identity(
    environ: Environ = os.environ,
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    is_interactive: bool | None = None,
) -> Identity:
    """Finds out which process of which job this is.

    The three arguments override everything. Otherwise the first launcher that has set its variables
    decides: jddp's own, JAX's variables, torchrun, Open MPI, MPICH, a step of Slurm, an Indexed Job
    of Kubernetes. If none has, this process is alone.

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
    overlay = {n: str(x) for n, x in zip(VARIABLES, given, strict=True) if x is not None}
    if len(overlay) == len(given):
        return _from_arguments(*overlay.values())
    environ = {**environ, **overlay}
    if is_interactive is None:
        # At a prompt, in a notebook, or in the shell of `srun --pty`.
        is_in_pty = bool(environ.get("SLURM_PTY_PORT")) and os.isatty(0)
        is_interactive = is_at_prompt() or is_in_pty
    half_set = None
    for source in (jax_variables, torchrun, *(() if is_interactive else SCHEDULERS)):
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


def jax_variables(environ: Environ) -> Identity | None:
    """The three variables that jddp's launcher sets, also on Ray, and Kubeflow's JAX runtime.

    jddp's launcher has split the devices, whatever scheduler is around it.
    """
    launcher = environ.get(LAUNCHED)
    names = Names(COUNT, ID, needed=VARIABLES)
    found = identify(environ, names, lambda: None, launcher or COUNT)
    if found is not None and not launcher:
        for source in (torchrun, *SCHEDULERS):
            _refuse_other_numbers(found, source, environ)
    return found


def _from_arguments(coordinator: str, num_processes: str, process_id: str) -> Identity:
    numbers = {"num_processes": num_processes, "process_id": process_id}
    names = Names("num_processes", "process_id", address="coordinator")
    found = identify(numbers, names, lambda: coordinator, "the arguments")
    assert found is not None
    return found


def _refuse_other_numbers(found: Identity, source: Resolver, environ: Environ) -> None:
    """Refuses numbers in JAX's variables that contradict the numbers of the scheduler.

    A job may have more processes than its scheduler has tasks, if each task starts several. It
    cannot have fewer. If it has as many, both numbers of a process must be equal.
    """
    other = None
    with contextlib.suppress(ConfigError):
        other = source({name: x for name, x in environ.items() if name not in (COUNT, ID)})
    if other is None or other.num_processes == 1:
        return
    is_other = other.num_processes == found.num_processes and other.process_id != found.process_id
    if is_other or other.num_processes > found.num_processes:
        raise ConfigError(
            f"{COUNT}={found.num_processes} and {ID}={found.process_id}, but {other.source} has "
            f"started process {other.process_id} of {other.num_processes}. Unset {COUNT} and {ID}, "
            "or give each process its own number."
        )


def _refuse_contradiction(found: Identity, environ: Environ) -> None:
    """Refuses single variables of JAX that contradict the launcher."""
    for name, number in ((COUNT, found.num_processes), (ID, found.process_id)):
        if environ.get(name, "") not in ("", str(number)):
            raise ConfigError(
                f"{name}={environ[name]}, but {found.source} has set {number}. Unset {name}, or "
                "start that many processes."
            )
