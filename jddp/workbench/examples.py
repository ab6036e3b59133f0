"""Runs the classifier of a run on its test examples.

    found = examples_of(open_run("runs/one", mesh=1))
    found.confusion, found.mistakes

Batches are read one by one, so memory does not grow with their number.
"""

from collections.abc import Iterator

import numpy as np

from jddp.ground.errors import UsageError
from jddp.ground.typing import Batch
from jddp.trainer.run import Run
from jddp.workbench.page.examples import TestAnswers, WrongAnswer

MOST_MISTAKES = 24


def examples_of(run: Run) -> TestAnswers:
    """Runs a model on its test examples.

    Args:
      run: An opened run, on one process.

    Raises:
      UsageError: If its loss is not the cross entropy of classes.
    """
    loss = ((run.config or {}).get("loss") or {}).get("name")
    if loss != "cross_entropy":
        raise UsageError(
            f"--examples: {run.run_dir} has the loss {loss!r}, whose test examples are not drawn. "
            "They are for loss.name=cross_entropy; in Python, see run.predict."
        )
    worst = list[WrongAnswer]()
    confusion = np.zeros((0, 0), int)
    for batch in run.test_batches:
        logits = run.predict([batch])
        counted = np.flatnonzero(batch.get("mask", np.ones(len(logits))))
        labels, logits = np.asarray(batch["label"])[counted], logits[counted]
        if not confusion.size:
            confusion = np.zeros((logits.shape[1], logits.shape[1]), int)
        np.add.at(confusion, (labels, logits.argmax(-1)), 1)
        if (images := _images_of(batch)) is not None:
            found = [*worst, *_mistakes(images[counted], labels, logits)]
            worst = sorted(found, key=lambda x: -x.probability)[:MOST_MISTAKES]
    return TestAnswers(run.step, int(confusion.sum()), confusion.tolist(), worst)


def _images_of(batch: Batch) -> np.ndarray | None:
    """The images of a batch; None for other inputs, such as tables, and for other channels."""
    images = np.asarray(batch.get("image", 0))
    return images if images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)) else None


def _mistakes(images: np.ndarray, labels: np.ndarray, logits: np.ndarray) -> Iterator[WrongAnswer]:
    """The most confident mistakes of a batch."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    sure = shifted.max(-1) / shifted.sum(-1)
    found = logits.argmax(-1)
    wrong = np.flatnonzero(labels != found)
    for i in wrong[np.argsort(-sure[wrong])][:MOST_MISTAKES]:
        pixels = images[i].copy()  # or the whole batch would be kept
        yield WrongAnswer(pixels, int(labels[i]), int(found[i]), float(sure[i]))
