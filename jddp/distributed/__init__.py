"""Code of each training process of a job: processes join, agree, fail and stop together.

`distributed.initialize(distributed.resolve_identity())` joins the job, before devices are used.
"""

from jddp.distributed.join import initialize
from jddp.distributed.resolve import resolve_identity

__all__ = ["initialize", "resolve_identity"]
