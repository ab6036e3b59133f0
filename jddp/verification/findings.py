"""The notes of a verification, and the likely causes of a difference."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jddp.engine.spec import Step

_CLOSE = 1e-3
NOT_REPEATABLE = """\
The step is another program each time it is traced: it depends on host-side
randomness or state, such as np.random, the time, or the order of a set, in which
processes differ. Put such numbers into the batch or constants=, or use jax.random."""
SAME_NUMBERS = """\
Random numbers are drawn, but not from the key of the step: every replica draws the
same ones, in each step. Use self.make_rng(name) or rngs.name() of the model; or
give the loss an argument `key`, as in nnx.Rngs(key)."""
OWN_NUMBERS = """\
Each replica draws its own random numbers: it is compared with one device that
computes the same replica batches with the same numbers. This does not show that
they add up to the whole batch: verify once more without the randomness."""
MICRO_BATCHES = """\
Batch norm takes the statistics of each micro-batch, here and on the one device: with
accumulate_steps this is another step than that of the whole batch."""
UNKNOWN = """\
No cause is known. Does the loss ask which replica it runs on (lax.axis_index), or how many
rows it sees? Both differ between one device and many."""


def not_finite(names: Iterable[str]) -> str:
    """The finding that the same numbers are not finite on many devices and on one.

    Args:
      names: Names of the first of them.
    """
    return (
        f"Not finite, on many devices and on one: {', '.join(names)}.\n"
        "That is of the model, the loss or the batch, not of the replicas, and leaves\n"
        "nothing to compare.\n"
        'jax.config.update("jax_debug_nans", True) names the operation that makes NaN.'
    )


def coarse(precision: str | None) -> str:
    """The finding that training rounds the factors of products, which were compared exactly.

    Args:
      precision: Value of `jax_default_matmul_precision` in training.
    """
    used = repr(precision) if precision else "the device's default, TF32 on A100 and newer"
    return (
        "float32 products and convolutions were compared at 'highest' precision.\n"
        f"Training will use {used}.\n"
        "TF32 rounds their factors to 11 bits. To train with exact products:\n"
        'jax.config.update("jax_default_matmul_precision", "highest").'
    )


def long_sums(found: Iterable[tuple[str, str, int]], compute_dtype: Any = None) -> str:
    """The finding that sums lose digits.

    Args:
      found: Primitive, dtype and number of terms of each, `jddp.jaxprs.long_sums`.
      compute_dtype: Dtype to which parameters are cast; None casts nothing.
    """
    cast = "precision casts parameters before the model reads them.\n" if compute_dtype else ""
    sums = "".join(f"  {name} of {num:,} terms in {dtype}\n" for name, dtype, num in sorted(found))
    return (
        "Sums of many terms lose digits in 16 bits, and may alone make a difference:\n"
        f"{sums}{cast}"
        "To add up in float32, gather float32 rows of an embedding and cast them then;\n"
        "add a float32 bias, and cast the result."
    )


def causes(
    spec: Step,
    *,
    num_devices: int,
    losses: tuple[float, float],
    is_scalar: bool,
    is_weighted: bool,
    combined: str | None,
    quantized: Iterable[str] = (),
) -> Iterator[str]:
    """Likely causes of a difference.

    Args:
      spec: The step of many devices.
      num_devices: Number of devices that were compared with one.
      losses: Losses of many devices, and of one.
      is_scalar: Whether the loss function returns a scalar.
      is_weighted: Whether the batch has entries that seem to be weights of losses.
      combined: How the gradient of the whole batch follows from those of the replica batches: as
        their "mean", as a mean with other "weights" than their rows, as "neither"; None if unknown.
      quantized: How the step quantizes, `jddp.jaxprs.quantizations`.
    """
    many, one = losses
    if is_scalar and np.isclose(many * num_devices, one, rtol=_CLOSE):
        yield (
            f"The loss is a sum over its rows: over the whole batch it is {num_devices} "
            "times that of a replica batch.\n"
            "Return one value per row, or their mean: a scalar is taken for a mean."
        )
    elif combined == "weights" or (combined is None and is_scalar and is_weighted):
        yield (
            "The loss divides by a count or sum of the weights of its rows, as in\n"
            "sum(l * w) / sum(w), so all replicas count alike whatever the weights of their rows.\n"
            "Return jddp.Mean(l * w, w): both are summed over all replicas before the division.\n"
            'Or return a loss per row or token, with batch["mask"].'
        )
    elif quantized and combined != "mean":
        yield (
            f"The step quantizes ({', '.join(sorted(quantized))}), and takes a maximum.\n"
            "Where the maximum is over rows, as in the backward pass of int8 layers (AQT), a\n"
            "replica takes that of its own rows, and rounds otherwise than one device does.\n"
            "Verify without quantization whether all else is equal."
        )
    elif combined == "neither":
        yield (
            "The loss couples examples: over the whole batch it is not a mean of those over the\n"
            "replica batches, and a replica has its own rows only. Where rows are compared with\n"
            "each other, jddp.all_gather(x) gives the rows of all replicas. Where means over rows\n"
            "are multiplied or squared, as in the balancing loss of a mixture of experts,\n"
            "take each mean over all replicas first: jax.lax.pmean(mean, jddp.AXIS)."
        )
    mode = spec.model.batch_norm
    if mode != "sync":
        yield (
            f"batch_norm={mode!r}: each replica normalises with the statistics of its own rows.\n"
            "With 'sync', the default, it uses those of the global batch."
        )
    if spec.model.sync.rules:
        yield (
            "state: a layer that normalises with such state uses that of its replica.\n"
            "If it is a batch norm, jddp.register_batch_norm(cls) gives it the rows of all. A\n"
            "ratio of averages, as a codebook is, is no mean of the replicas' ratios: in the\n"
            "layer, add up counts and sums, jax.lax.psum(x, jddp.AXIS), before they are divided."
        )
    if spec.reducer.hook_name:
        yield "A hook reduces gradients: its result need not be their mean."
