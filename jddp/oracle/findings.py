"""From what was seen to what seems to be wrong, in plain words."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

CLOSE = 1e-3


@dataclasses.dataclass
class Evidence:
    """What was seen beside the numbers.

    Attributes:
      num_devices: That were compared with one.
      options: Given to `jddp.DataParallel`.
      warnings: That were given while the step was traced.
      scalars: The loss and metrics that are scalars.
      has_mask: Whether the batch has a mask.
      is_repeatable: Whether the step, traced anew, is the same program.
      draws: Whether the step draws random numbers.
      key_matters: Whether another key makes a difference.
      rows_meet: Whether the loss of the whole batch is another than that of its halves.
      losses: Of many devices, and of one.
    """

    num_devices: int
    options: Mapping[str, Any]
    warnings: tuple[str, ...]
    scalars: tuple[str, ...]
    has_mask: bool
    is_repeatable: bool
    draws: bool
    key_matters: bool = True
    rows_meet: bool = False
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
    is_sum = np.isclose(many * evidence.num_devices, one, rtol=CLOSE)
    weighs_replicas = "loss" in evidence.scalars and evidence.has_mask
    if "loss" in evidence.scalars and is_sum:
        yield (
            f"The loss is a sum over its rows: over all {evidence.num_devices} shares it is "
            f"{evidence.num_devices} times that of one.\n"
            "Return one value per row, or their mean: a scalar is taken for a mean."
        )
    elif weighs_replicas:
        yield (
            "The loss is a scalar, so replicas weigh alike however many rows their mask leaves.\n"
            "Return one value per row: then each row weighs alike."
        )
    mode = evidence.options.get("batch_norm", "sync")
    if mode != "sync":
        yield (
            f"batch_norm={mode!r}: each replica normalises with the statistics of its own rows.\n"
            "With 'sync', the default, they are those of the global batch."
        )
    for warning in evidence.warnings:
        if "cannot synchronise" in warning:
            yield (
                f"{warning}\n"
                "If the layer normalises with them, give it a field axis_name, as Flax's own has."
            )
    if evidence.options.get("comm_hook") is not None:
        yield "A comm_hook sends gradients: what it makes of them need not be their mean."
    if evidence.rows_meet and not is_sum and not weighs_replicas:
        yield (
            "Rows meet in the loss: over the whole batch it is not the mean of those over its\n"
            "halves, and a replica sees its own rows only. jddp.all_gather gives it all of them."
        )
