"""Compares two trees leaf by leaf: their largest relative difference, and its leaf."""

import dataclasses
import math

import jax
import numpy as np

from jddp.engine.state import by_path
from jddp.typing import Grads, PyTree, Shown

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
    a gradient of zero, of which only rounding is left.
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
        if error or update:  # and not where the learning rate begins at zero
            errors[path] = error / update if update else math.inf
    return _worst(what, errors, UPDATE)


def not_finite_in_both(got: PyTree, want: PyTree) -> list[str]:
    """Paths of the leaves that are not finite in both trees."""
    return [
        path for path, both in _leaves(got, want) if not any(np.isfinite(x).all() for x in both)
    ]


def _worst(what: str, errors: dict[str, float], allowed: float) -> Comparison:
    # NaN is the worst error, but compares as smaller than any.
    leaf = max(errors, key=lambda path: np.nan_to_num(errors[path], nan=math.inf), default="")
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
