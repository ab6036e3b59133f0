"""From what was seen to what seems to be wrong, in plain words."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_CLOSE = 1e-3


@dataclasses.dataclass
class Evidence:
    """What was seen beside the numbers.

    Attributes:
      num_devices: That were compared with one.
      options: Given to `jddp.DataParallel`.
      scalars: The loss and metrics that are scalars.
      weights: The entries of the batch that seem to be weights of losses, by name.
      is_repeatable: Whether the step, traced anew, is the same program.
      draws: Whether the step draws random numbers.
      key_matters: Whether another key makes a difference.
      combined: How the gradient of the whole batch is made of those of its shares: as their
        "mean", as a mean with other "weights" than their rows, as "neither"; None where that is
        not known.
      losses: Of many devices, and of one.
    """

    num_devices: int
    options: Mapping[str, Any]
    scalars: tuple[str, ...]
    weights: tuple[str, ...]
    is_repeatable: bool
    draws: bool
    key_matters: bool = True
    combined: str | None = None
    losses: tuple[float, float] = (0.0, 0.0)


def explain(evidence: Evidence, *, passed: bool) -> list[str]:
    """Sentences: what is worth knowing in any case, and where it did not pass, why."""
    found = list(_notes(evidence))
    if passed:
        return found
    causes = list(_causes(evidence))
    return found + (causes or ([] if not evidence.is_repeatable else [UNKNOWN]))


UNKNOWN = """\
No cause is known. Does the loss ask which replica it runs on (lax.axis_index), or how many
rows it sees? Both differ between one device and many."""


def _notes(evidence: Evidence) -> Iterator[str]:
    if not evidence.is_repeatable:
        yield (
            "The step is another program each time it is traced: something of the host gets in,\n"
            "such as np.random, the time, or the order of a set. Processes would differ in it.\n"
            "Put such numbers into the batch or constants=, or draw them with jax.random."
        )
    if evidence.draws and not evidence.key_matters:
        yield (
            "Random numbers are drawn, and not from the key of the step: with a key of its own\n"
            "every replica draws the same, in each step. Take self.make_rng(name), or rngs.name()."
        )
    elif evidence.draws:
        yield (
            "Random numbers are drawn, by each replica its own: judged beside one device that\n"
            "draws the same, share by share. Whether shares add up to the whole batch is not\n"
            "seen so: verify once more with the noise turned off."
        )


def _causes(evidence: Evidence) -> Iterator[str]:
    many, one = evidence.losses
    is_sum = np.isclose(many * evidence.num_devices, one, rtol=_CLOSE)
    is_scalar = "loss" in evidence.scalars
    seems_weighted = is_scalar and evidence.combined is None and evidence.weights
    if is_scalar and is_sum:
        yield (
            f"The loss is a sum over its rows: over all {evidence.num_devices} shares it is "
            f"{evidence.num_devices} times that of one.\n"
            "Return one value per row, or their mean: a scalar is taken for a mean."
        )
    elif evidence.combined == "weights" or seems_weighted:
        yield (
            "The loss divides by a count or sum of its own rows' weights, as in\n"
            "sum(l * w) / sum(w), so replicas weigh alike however much their rows weigh.\n"
            "Return jddp.Mean(l * w, w): both are added up over all replicas before they are\n"
            'divided. Or return a loss per row or token, with batch["mask"].'
        )
    elif evidence.combined == "neither":
        yield (
            "Rows meet in the loss: over the whole batch it is not a mean of those over its\n"
            "shares, and a replica sees its own rows only. Where rows are compared with each\n"
            "other, jddp.all_gather(x) gives the rows of all replicas. Where means over rows\n"
            "are multiplied or squared, as in the balancing loss of a mixture of experts,\n"
            "take each mean over all replicas first: jax.lax.pmean(mean, jddp.AXIS)."
        )
    mode = evidence.options.get("batch_norm", "sync")
    if mode != "sync":
        yield (
            f"batch_norm={mode!r}: each replica normalises with the statistics of its own rows.\n"
            "With 'sync', the default, they are those of the global batch."
        )
    if evidence.options.get("state_reduction"):
        yield (
            "state_reduction: a layer that normalises with such state does so with its own\n"
            "replica's. If it is a batch norm, jddp.register_batch_norm(cls) gives it all rows."
        )
    if evidence.options.get("comm_hook") is not None:
        yield "A comm_hook sends gradients: what it makes of them need not be their mean."
