"""The fingerprint of a step: text to compare between processes that step together."""

import hashlib

from jddp.engine.state import by_path
from jddp.engine.trainable import Trainable
from jddp.typing import Batch


def fingerprint(ddp: Trainable, batch: Batch) -> dict[str, str]:
    """Returns facts that must be equal on all processes that step together.

    Args:
      ddp: A `jddp.DataParallel`.
      batch: This process's rows, or their `jax.ShapeDtypeStruct`s.

    Returns:
      Shape and dtype of each leaf of the state, by path, and a digest of the lowered step.
    """
    program = hashlib.sha256(ddp.steps.lower(batch).as_text().encode()).hexdigest()
    leaves = by_path(ddp.steps.abstract_state(batch)).items()
    return {name: f"{x.shape} {x.dtype}" for name, x in leaves} | {"the lowered step": program}
