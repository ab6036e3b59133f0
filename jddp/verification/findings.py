"""Derives likely causes from the evidence of a comparison, and describes them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_CLOSE = 1e-3


@dataclasses.dataclass
class Evidence:
    """Properties of the step and the batch, beside the compared numbers.

    Attributes:
      num_devices: Number of devices that were compared with one.
      options: Options of `jddp.DataParallel`.
      scalars: Names of the loss and metrics that are scalars.
      weights: Names of the entries of the batch that seem to be weights of losses.
      is_repeatable: Whether the step is the same program when traced again.
      draws: Whether the step uses random numbers.
      key_matters: Whether another PRNG key changes the result.
      combined: How the gradient of the whole batch follows from those of the replica batches: as
        their "mean", as a mean with other "weights" than their rows, as "neither"; None if unknown.
      losses: Losses of many devices, and of one.
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
    """Notes, which hold in any case, and likely causes where the comparison did not pass."""
    causes = [] if passed else list(_causes(evidence)) or [UNKNOWN] * evidence.is_repeatable
    return [*_notes(evidence), *causes]


UNKNOWN = """\
No cause is known. Does the loss ask which replica it runs on (lax.axis_index), or how many
rows it sees? Both differ between one device and many."""


def _notes(evidence: Evidence) -> Iterator[str]:
    if not evidence.is_repeatable:
        yield (
            "The step is another program each time it is traced: it depends on host-side\n"
            "randomness or state, such as np.random, the time, or the order of a set, in which\n"
            "processes differ. Put such numbers into the batch or constants=, or use jax.random."
        )
    if evidence.draws and not evidence.key_matters:
        yield (
            "Random numbers are drawn, but not from the key of the step: every replica draws the\n"
            "same ones, in each step. Use self.make_rng(name), or rngs.name()."
        )
    elif evidence.draws:
        yield (
            "Each replica draws its own random numbers: it is compared with one device that\n"
            "computes the same replica batches with the same numbers. This does not show that\n"
            "they add up to the whole batch: verify once more without the randomness."
        )


def _causes(evidence: Evidence) -> Iterator[str]:
    many, one = evidence.losses
    is_sum = np.isclose(many * evidence.num_devices, one, rtol=_CLOSE)
    is_scalar = "loss" in evidence.scalars
    seems_weighted = is_scalar and evidence.combined is None and evidence.weights
    if is_scalar and is_sum:
        yield (
            f"The loss is a sum over its rows: over the whole batch it is {evidence.num_devices} "
            "times that of a replica batch.\n"
            "Return one value per row, or their mean: a scalar is taken for a mean."
        )
    elif evidence.combined == "weights" or seems_weighted:
        yield (
            "The loss divides by a count or sum of the weights of its rows, as in\n"
            "sum(l * w) / sum(w), so all replicas count alike whatever the weights of their rows.\n"
            "Return jddp.Mean(l * w, w): both are summed over all replicas before the division.\n"
            'Or return a loss per row or token, with batch["mask"].'
        )
    elif evidence.combined == "neither":
        yield (
            "The loss couples examples: over the whole batch it is not a mean of those over the\n"
            "replica batches, and a replica has its own rows only. Where rows are compared with\n"
            "each other, jddp.all_gather(x) gives the rows of all replicas. Where means over rows\n"
            "are multiplied or squared, as in the balancing loss of a mixture of experts,\n"
            "take each mean over all replicas first: jax.lax.pmean(mean, jddp.AXIS)."
        )
    mode = evidence.options.get("batch_norm", "sync")
    if mode != "sync":
        yield (
            f"batch_norm={mode!r}: each replica normalises with the statistics of its own rows.\n"
            "With 'sync', the default, it uses those of the global batch."
        )
    if evidence.options.get("state_reduction"):
        yield (
            "state_reduction: a layer that normalises with such state uses that of its replica.\n"
            "If it is a batch norm, jddp.register_batch_norm(cls) gives it the rows of all."
        )
    if evidence.options.get("comm_hook") is not None:
        yield "A comm_hook reduces gradients: its result need not be their mean."
