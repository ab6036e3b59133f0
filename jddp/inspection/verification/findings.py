"""The report of a verification: comparisons of trees, notes, and likely causes of a difference."""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jddp.engine.state import by_path
from jddp.engine.step import Step
from jddp.ground.typing import Grads, PyTree, Shown

UPDATE = 0.05  # allowed difference of an update, relative to its norm
_NOT_COMPARED = {"update": "zero on both, as at a learning rate of 0"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far apart two trees are.

    Attributes:
      what: Name of the compared trees.
      leaf: Path of the largest difference; empty where there is nothing to compare.
      error: Largest difference, relative to the largest entry of the leaf.
      allowed: Largest difference that passes.
    """

    what: str
    leaf: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the difference is small enough."""
        return self.error <= self.allowed  # False for NaN


@dataclasses.dataclass(frozen=True, repr=False)
class Verification(Shown):
    """The report of `jddp.verify`; its `str` fits a terminal of 80 columns.

    Attributes:
      num_devices: Number of devices that were compared with one.
      num_rows: Number of rows of the batch.
      is_side_by_side: Whether the one device ran all replica batches, with their random numbers.
      comparisons: Comparisons of metrics, gradients, other state and update.
      findings: Likely causes of a failure, and notes.
    """

    num_devices: int
    num_rows: int
    is_side_by_side: bool
    comparisons: tuple[Comparison, ...]
    findings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether N devices equal one device within rounding."""
        return all(comparison.passed for comparison in self.comparisons)

    def __repr__(self) -> str:
        """The verdict, a table, and the findings."""
        one = "one that runs their batches" if self.is_side_by_side else "one"
        verdict = "equal within rounding" if self.passed else "NOT equal"
        lines = [
            f"{self.num_devices} devices vs {one}, {self.num_rows} examples: {verdict}",
            "",
            f"{'':16} {'error':>8} {'allowed':>8}  worst at",
        ]
        for x in self.comparisons:
            mark = "" if x.passed else "  <- differs"
            numbers = f"{x.error:8.1e} {x.allowed:8.1e}" if x.leaf else f"{'-':>8} {'-':>8}"
            where = x.leaf or _NOT_COMPARED.get(x.what, "nothing to compare")
            lines.append(f"{x.what:16} {numbers}  {where}{mark}")
        return "\n".join([*lines, *(f"\n{finding}" for finding in self.findings)])


def compare(
    what: str, got: PyTree, want: PyTree, *, allowed: float, floor: float = 0.1
) -> Comparison:
    """Compares leaf by leaf; errors are relative to the leaf's largest entry.

    A leaf counts as no smaller than `floor` times the largest leaf: a bias before a batch norm has
    a gradient of zero, and only rounding errors would be compared.
    """
    leaves = _leaves(got, want)
    largest = max((_size(b) for _, (_, b) in leaves), default=0.0)
    errors = {
        path: _size(a - b) / (max(_size(b), floor * largest) or 1.0) for path, (a, b) in leaves
    }
    return _worst(what, errors, allowed)


def compare_moves(
    what: str, before: PyTree, got: PyTree, want: PyTree, grads: Grads, *, noise: float
) -> Comparison:
    """Compares updates by norms, where gradients are larger than noise.

    Args:
      what: Name of the comparison.
      before: Values before the update.
      got: Values after it.
      want: Expected values after it.
      grads: Gradients of one device.
      noise: Part of the largest gradient in a leaf that may be the rounding of zero.
    """
    errors = {}
    leaves = _leaves(got, want, before, grads)
    largest = max((_size(grad) for _, (*_, grad) in leaves), default=0.0)
    for path, (a, b, start, grad) in leaves:
        counts = np.abs(grad) > noise * max(_size(grad), 0.1 * largest)
        error, update = (float(np.linalg.norm(x[counts])) for x in (a - b, b - start))
        if error or update:  # Both are zero at a learning rate of zero.
            errors[path] = error / update if update else float("inf")
    return _worst(what, errors, UPDATE)


def not_finite_in_both(got: PyTree, want: PyTree) -> list[str]:
    """Paths of the leaves that are not finite in both trees."""
    return [
        path for path, both in _leaves(got, want) if not any(np.isfinite(x).all() for x in both)
    ]


def _worst(what: str, errors: dict[str, float], allowed: float) -> Comparison:
    # NaN is the worst error, but compares as smaller than any.
    leaf = max(errors, key=lambda path: np.nan_to_num(errors[path], nan=float("inf")), default="")
    return Comparison(what, leaf, errors.get(leaf, 0.0), allowed)


def _leaves(*trees: PyTree) -> list[tuple[str, list[np.ndarray]]]:
    """For each leaf its path, and its arrays in all trees, in double precision."""
    return [
        (path, list(map(exact, leaves)))
        for path, *leaves in zip(by_path(trees[0]), *map(jax.tree.leaves, trees), strict=True)
        if not jax.numpy.issubdtype(leaves[0].dtype, jax.dtypes.prng_key)
    ]


def exact(x: jax.Array | np.ndarray) -> np.ndarray:
    """An array in double precision."""
    return np.asarray(x).astype(np.promote_types(x.dtype, np.float64))


def _size(x: np.ndarray | np.generic) -> float:
    return float(np.abs(x).max(initial=0.0))


_CLOSE = 1e-3
NOT_REPEATABLE = """\
Two traces of the step give different programs: it depends on host-side
randomness or state, such as np.random, the time, or the order of a set, which
differ between processes. Put such values into the batch or constants=, or use
jax.random."""
SAME_NUMBERS = """\
Random numbers are drawn, but not from the key of the step: every replica draws the
same ones, in each step. Use self.make_rng(name) or rngs.name() of the model; or
give the loss an argument `key`, as in nnx.Rngs(key)."""
OWN_NUMBERS = """\
Each replica draws its own random numbers, so the step is compared with one
device that computes the same replica batches with the same numbers. This does
not show that they add up to the whole batch: verify again without randomness."""
MICRO_BATCHES = """\
Batch norm uses the statistics of each micro-batch, on many devices and on one.
So with accumulate_steps a step differs from a step on the whole batch at once."""
UNKNOWN = """\
No cause is known. Does the loss ask which replica it runs on (lax.axis_index),
or how many rows it sees? Both differ between one device and many."""


def not_finite(names: Iterable[str]) -> str:
    """The finding that the same numbers are not finite on many devices and on one.

    Args:
      names: Names of the first of them.
    """
    return (
        f"Not finite, on many devices and on one: {', '.join(names)}.\n"
        "The cause is in the model, the loss or the batch, not in the replicas.\n"
        "Nothing is left to compare.\n"
        'jax.config.update("jax_debug_nans", True) names the operation that makes NaN.'
    )


def coarse(precision: str | None) -> str:
    """The finding that training will round products more coarsely than this comparison.

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


def causes(
    spec: Step,
    *,
    num_devices: int,
    losses: tuple[float, float],
    is_scalar: bool,
    is_weighted: bool,
    combined: str | None,
) -> Iterator[str]:
    """Likely causes of a difference.

    Args:
      spec: The step of many devices.
      num_devices: Number of devices that were compared with one.
      losses: Losses of many devices, and of one.
      is_scalar: Whether the loss function returns a scalar.
      is_weighted: Whether the batch has entries that seem to be weights of losses.
      combined: How the gradient of the whole batch follows from the gradients of the replica
        batches: as their "mean", as a mean with other "weights" than their rows, as "neither"; None
        if it is not known.
    """
    many, one = losses
    if is_scalar and np.isclose(many * num_devices, one, rtol=_CLOSE):
        yield (
            f"The loss is a sum over rows: the loss of the whole batch is {num_devices} times "
            "the\nloss of a replica batch.\n"
            "Return one value per row, or their mean: a scalar is taken for a mean."
        )
    elif combined == "weights" or (combined is None and is_scalar and is_weighted):
        yield (
            "The loss divides by a count or sum of the weights of its rows, as in\n"
            "sum(l * w) / sum(w), so all replicas count alike, whatever the weights of their\n"
            "rows. Return jddp.Mean(l * w, w): both are summed over all replicas before the\n"
            "division.\n"
            'Or return a loss per row or token, with batch["mask"].'
        )
    elif combined == "neither":
        yield (
            "The loss couples examples: over the whole batch it is not a mean of the losses\n"
            "of the replica batches, and a replica has only its own rows. Where rows are\n"
            "compared with each other, jddp.all_gather(x) returns the rows of all replicas.\n"
            "Where means over rows are multiplied or squared, as in the balancing loss of a\n"
            "mixture of experts, average each mean over replicas first:\n"
            "jax.lax.pmean(mean, jddp.AXIS)."
        )
    mode = spec.model.batch_norm
    if mode != "sync":
        yield (
            f"batch_norm={mode!r}: each replica normalises with statistics of its own rows.\n"
            "With 'sync', the default, all use the statistics of the global batch."
        )
    if spec.model.sync.rules:
        yield (
            "state: a layer that normalises with such state uses the state of its replica.\n"
            "If it is a batch norm, jddp.register_batch_norm(cls) gives it the rows of all.\n"
            "A ratio of averages, such as a codebook, is not the mean of the replicas'\n"
            "ratios: in the layer, sum counts and totals with jax.lax.psum(x, jddp.AXIS)\n"
            "before dividing."
        )
    if spec.reducer.hook_name:
        yield "A hook reduces gradients: its result need not be their mean."
