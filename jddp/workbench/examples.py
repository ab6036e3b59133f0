"""Runs the classifier of a run on its test examples.

    found = examples_of(open_run("runs/one", mesh=1))
    found.confusion, found.mistakes

Batches are read one by one, so memory does not grow with their number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from jddp.ground.errors import UsageError
from jddp.trainer.run import Run
from jddp.workbench.pages import draw_matrix, draw_scores, picture


@dataclass(frozen=True)
class WrongAnswer:
    """An example that the model classifies with confidence, but wrongly.

    Attributes:
      pixels: The image, as the model gets it.
      label: The class that it has.
      predicted: The class that the model found.
      probability: The probability that the model gave to it.
    """

    pixels: np.ndarray
    label: int
    predicted: int
    probability: float


@dataclass(frozen=True)
class TestAnswers:
    """The answers of a classifier to the test examples of its run.

    Attributes:
      step: Step of its checkpoint.
      num_examples: Number of examples.
      confusion: Number of examples of each class, in rows, by the class that was found.
      mistakes: The most confident mistakes, the worst first.
    """

    step: int
    num_examples: int
    confusion: Sequence[Sequence[float]]
    mistakes: Sequence[WrongAnswer]


def draw_examples(found: TestAnswers, names: Sequence[str]) -> str:
    """Returns the section; classes have names where they are known."""
    about = f"{found.num_examples:,} test examples, by the checkpoint of step {found.step:,}."
    numbers = [str(number) for number in range(len(found.confusion))]
    names = names if len(names) == len(numbers) else numbers
    recall = [row[i] / sum(row) if sum(row) else None for i, row in enumerate(found.confusion)]
    parts = [draw_matrix("label by prediction", found.confusion, names)]
    parts.append(draw_scores("recall", recall, names))
    shown = "".join(_mistake(x, names) for x in found.mistakes)
    words = "<h3>Most confident mistakes: the prediction, and the label</h3>" if shown else ""
    return (
        f'<p class="note">{about}</p><div class="charts">{"".join(parts)}</div>'
        f'{words}<div class="mistakes">{shown}</div>'
    )


def _mistake(mistake: WrongAnswer, names: Sequence[str]) -> str:
    predicted, label = names[mistake.predicted], names[mistake.label]
    return (
        f"<figure>{picture(mistake.pixels, f'{label}, taken for {predicted}')}"
        f"<figcaption><b>{escape(predicted)}</b> {mistake.probability:.0%}<br>{escape(label)}"
        "</figcaption></figure>"
    )


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
        assert isinstance(batch, Mapping)
        logits = np.asarray(run.predict([batch]))
        counted = np.flatnonzero(batch.get("mask", np.ones(len(logits))))
        labels, logits = np.asarray(batch["label"])[counted], logits[counted]
        if not confusion.size:
            confusion = np.zeros((logits.shape[1], logits.shape[1]), int)
        np.add.at(confusion, (labels, logits.argmax(-1)), 1)
        if (images := _images_of(batch)) is not None:
            found = [*worst, *_mistakes(images[counted], labels, logits)]
            worst = sorted(found, key=lambda x: -x.probability)[:MOST_MISTAKES]
    return TestAnswers(run.step, int(confusion.sum()), confusion.tolist(), worst)


def _images_of(batch: Mapping[str, np.ndarray]) -> np.ndarray | None:
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
        pixels = images[i].copy()  # Without a copy the whole batch would stay in memory.
        yield WrongAnswer(pixels, int(labels[i]), int(found[i]), float(sure[i]))
