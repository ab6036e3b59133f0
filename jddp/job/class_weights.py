"""The labels that a run counts, and the weights that balance their classes."""

import numpy as np

from jddp.data.examples import Examples, column_of
from jddp.errors import DataError


def counted_labels(
    part: str, examples: Examples, frequencies: np.ndarray | None = None, *, reads: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The labels of the examples that count, and how often an epoch takes each of them.

    Examples do not count that an epoch never takes, or whose mask is 0. The arrays are empty if
    there are no labels, or none at hand.

    Args:
      part: "train" or "test", for the error.
      examples: Examples of that part.
      frequencies: How often an epoch takes each; None for once.
      reads: Whether all examples are read for labels that are not at hand.

    Raises:
      DataError: If one of these labels is negative.
    """
    labels = column_of(examples, "label", reads=reads)
    if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1:
        return np.zeros(0, int), np.zeros(0)
    counts = np.ones(len(labels)) if frequencies is None else frequencies
    # Where labels are at hand, so is a mask, but for the mask of images that do not decode.
    mask = column_of(examples, "mask", reads=column_of(examples, "label") is None)
    if mask is not None:
        counts = counts * (mask > 0).reshape(len(mask), -1).any(1)
    is_counted = counts > 0
    if len(wrong := np.flatnonzero(is_counted & (labels < 0))):
        raise DataError(
            f"{part}: the label of example {wrong[0]} is {labels[wrong[0]]}, one of {len(wrong):,} "
            "negative ones. Classes count from 0: leave such examples out, or give all a 'mask', "
            "with 0 for these."
        )
    return labels[is_counted].astype(np.int64), counts[is_counted]


def balanced_weights(
    labels: np.ndarray, num_classes: int = 0, frequencies: np.ndarray | None = None
) -> list[float]:
    """The weights with which each class has the same sum of weights: n / (num_classes * n_class).

    Args:
      labels: Labels of the training examples, whole numbers `(n,)`.
      num_classes: Number of classes; 0 for the largest label and one.
      frequencies: How often an epoch takes each example; None for once.

    Raises:
      DataError: If a class has no example.
    """
    counts = np.bincount(labels, frequencies, max(1, num_classes))
    if not counts.all():
        raise DataError(
            f"loss.class_weights=balanced: class {int(counts.argmin())} has no training example. "
            "Give a list of weights."
        )
    return (counts.sum() / (len(counts) * counts)).tolist()
