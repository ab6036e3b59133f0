"""Refuses a process of a launcher that has joined no job, and would train by itself.

    refuse_unjoined()    # before anything is compiled

Without this, a program that forgets to join would train once in each of its processes.

Only the numbers count that the launcher has set, even if nothing gives the address of process 0:
several processes were started, whether or not they could connect.
"""

import contextlib
import os

from jddp.distributed.identity import ADDRESS, Environ, Identity
from jddp.distributed.resolve import resolve_identity
from jddp.errors import ConfigError, UsageError

JOIN = "from jddp import distributed", "distributed.initialize(distributed.resolve_identity())"
# Address of process 0 if a launcher gives none, so that the numbers alone decide.
_ADDRESS = {ADDRESS: "process-0:1"}
_MASTER = {"MASTER_ADDR": "process-0", "MASTER_PORT": "1"}


def started_job(environ: Environ = os.environ) -> Identity | None:
    """The job of several processes that a launcher's variables describe; None for a job of one.

    Incomplete or contradictory variables describe none.
    """
    given = {name: value for name, value in environ.items() if value}
    for address in (_ADDRESS, _ADDRESS | _MASTER):
        with contextlib.suppress(ConfigError):
            identity = resolve_identity({**address, **given})
            if identity.num_processes > 1:
                return identity
    return None


def unjoined_job(environ: Environ = os.environ) -> Identity | None:
    """The job that a launcher describes, if JAX has one process, which has not joined the job."""
    import jax

    job = started_job(environ)
    return job if job is not None and jax.process_count() == 1 else None


def explain_unjoined(job: Identity) -> tuple[str, str]:
    """The mistake of a process that has not joined this job, and the way out."""
    what = (
        f"{job.source} has started {job.num_processes} processes, of which this is number "
        f"{job.process_id}, but it has not joined them: each would train by itself."
    )
    first, second = JOIN
    way_out = (
        f"Add two lines before JAX is used: `{first}` and `{second}`. To train by itself on "
        f"purpose, unset {job.count_in}."
    )
    return what, way_out


def refuse_unjoined() -> None:
    """Refuses to train in one process of several that have not connected.

    Raises:
      UsageError: If a launcher's variables describe a job of several, and JAX has one process.
    """
    if (job := unjoined_job()) is not None:
        raise UsageError(" ".join(explain_unjoined(job)))
