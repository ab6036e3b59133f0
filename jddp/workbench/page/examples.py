"""The section of a run's page on test examples, for which its model was run."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

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
