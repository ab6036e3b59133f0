"""What a step is made of, as text to compare between processes, and whether it uses randomness."""

import hashlib
from typing import Any

from jddp.checkpoint.arrays import by_path
from jddp.typing import Batch


def fingerprint(ddp: Any, batch: Batch) -> dict[str, str]:
    """Returns what processes that step together must have in common.

    Args:
      ddp: A `jddp.DataParallel`.
      batch: This process's rows, or their `jax.ShapeDtypeStruct`s.

    Returns:
      Shape and dtype of each leaf of the state, by path, and a digest of the lowered step.
    """
    program = hashlib.sha256(ddp.lower(batch).as_text().encode()).hexdigest()
    leaves = by_path(ddp.abstract_state(batch)).items()
    return {name: f"{x.shape} {x.dtype}" for name, x in leaves} | {"the lowered step": program}


def uses_rng(ddp: Any, batch: Batch) -> bool:
    """Whether model or loss use random numbers, such as dropout's; traces, runs nothing.

    Those of a hook or an optimizer are the same on every replica, or sent as gradients are.
    """
    ddp.abstract_state(batch)  # plans buckets for the batch, from its traced passes
    return bool(ddp.steps.traced.uses_rng)
