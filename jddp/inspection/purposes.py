"""What a collective of a step is for, by the name scopes of the traced step.

purpose_of(collective)     # "gradients", "parameters, updated", "loss and metrics", ...
"""

import re

from jddp.engine.optimizer import GATHERED
from jddp.inspection.collectives import Collective
from jddp.modules.base import LOSS
from jddp.reduce.units import BETWEEN, UNIT

GRADIENTS, PARAMETERS = "gradients", "parameters, in outer steps"
_OF_OPTIMIZER = {GATHERED: "optimizer, whole arrays", "parameters": "parameters, updated"}
_BUCKET = re.compile(r"\bbucket_(\d+)/")


def bucket_of(collective: Collective) -> int | None:
    """The position of the bucket in the plan, if it sends one."""
    found = _BUCKET.search(collective.op_name)
    return int(found[1]) if found else None


def is_backward(op_name: str) -> bool:
    """Whether an operation of the traced step is one of the backward pass."""
    # In newer JAX, a backward pass in which buckets leave has lost the name of its call.
    is_opened = f"/{LOSS}/" in op_name and "jvp(" not in op_name
    return is_opened or "transpose(" in op_name


def purpose_of(collective: Collective) -> str:
    """The purpose of a collective, from the name scopes of the step."""
    if "outer_step/" in collective.op_name:
        return PARAMETERS
    if bucket_of(collective) is not None:
        return GRADIENTS
    if UNIT in collective.op_name:
        is_gathered = f"{UNIT}parameters" in collective.op_name
        where = ", between groups" if BETWEEN in collective.op_name else ""
        where += ", in loops" if collective.is_in_loop else ""
        return (f"parameters, {_direction(collective)}" if is_gathered else GRADIENTS) + where
    for scope, purpose in _OF_OPTIMIZER.items():
        if f"{scope}/" in collective.op_name:
            return purpose
    if "metrics/" in collective.op_name:
        # XLA merges collectives of one kind: here a layer's sums with those of the loss.
        is_joined = is_backward(collective.op_name) or "BatchNorm" in collective.op_name
        return f"metrics; the model, {_direction(collective)}" if is_joined else "loss and metrics"
    return f"the model, {_direction(collective)}"


def _direction(collective: Collective) -> str:
    return "backward" if is_backward(collective.op_name) else "forward"
