"""The processes of a job: a launcher starts them, they join, agree, fail and stop together.

`distributed.initialize(distributed.resolve_identity())` joins the job, before devices are used.
"""

from jddp.distributed.identity import resolve_identity
from jddp.distributed.join import initialize

__all__ = ["initialize", "resolve_identity"]
