"""What runs inside a training process of a job: join it, agree, fail and stop together.

`distributed.initialize(distributed.resolve_identity())` joins, before any device is touched.
"""

from jddp.distributed.join import initialize
from jddp.distributed.resolve import resolve_identity

__all__ = ["initialize", "resolve_identity"]
