"""The processes of a job: a launcher starts them, they join, agree, fail and stop together.

`distributed.initialize(distributed.resolve_identity())` joins the job, before devices are used.
"""

from jddp.distributed.join import initialize
from jddp.distributed.schedulers import resolve_identity

__all__ = ["initialize", "resolve_identity"]
