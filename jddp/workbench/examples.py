"""Runs the model of a run on its test examples: mistakes of a classifier, losses of tokens.

    found = examples_of(open_run("runs/one", mesh=1))
    found.confusion, found.mistakes, found.loss_by_position

Batches are read one by one, so memory does not grow with their number.
"""

from collections.abc import Iterator

import numpy as np
from jax import Array
from jaxtyping import Float

from jddp.ground.errors import Error, UsageError
from jddp.ground.typing import Batch
from jddp.modules.inputs import Model
from jddp.trainer.run import Run
from jddp.workbench.page.examples import TestAnswers, WrongAnswer
from jddp.workbench.sampling import continue_text
from jddp.workbench.tokenize import BYTES
from jddp.zoo.losses import next_token

MOST_MISTAKES = 24
PROMPT, SAMPLE = 48, 160  # tokens


def examples_of(run: Run) -> TestAnswers:
    """Runs a model on its test examples.

    Args:
      run: An opened run, on one process.

    Raises:
      UsageError: If its loss is neither the cross entropy of classes nor of tokens.
    """
    loss = ((run.config or {}).get("loss") or {}).get("name")
    if loss == "cross_entropy":
        return _of_a_classifier(run)
    if loss == "next_token":
        return _of_a_language_model(run)
    raise UsageError(
        f"--examples: {run.run_dir} has the loss {loss!r}, whose test examples are not drawn. They "
        "are for loss.name cross_entropy or next_token; in Python, see run.predict."
    )


def _of_a_classifier(run: Run) -> TestAnswers:
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


def _of_a_language_model(run: Run) -> TestAnswers:
    total = count = np.zeros(1)
    num_examples = 0
    prompt = sample = ""
    for batch in run.test_batches:
        if not num_examples:
            prompt, sample = _sample(run, batch)
        losses = run.predict([batch], _token_losses)
        num_examples += len(losses)
        mask = np.asarray(batch.get("mask", np.ones(losses.shape)))
        total = total + np.where(mask, losses, 0).sum(0)
        count = count + mask.sum(0)
    means = (total / np.maximum(count, 1)).tolist()
    return TestAnswers(run.step, num_examples, loss_by_position=means, prompt=prompt, sample=sample)


def _token_losses(model: Model, batch: Batch) -> Float[Array, "b t"]:
    return next_token(model, batch, train=False)[0]


def _sample(run: Run, batch: Batch) -> tuple[str, str]:
    """The beginning of the first example, and what the model continues it with; "" for no bytes."""
    tokens = np.asarray(batch["tokens"])[0, :PROMPT].tolist()
    if max(tokens) >= BYTES.vocab_size:
        return "", ""
    prompt = BYTES.decode(tokens)
    try:
        return prompt, continue_text(run, prompt, num_tokens=SAMPLE).removeprefix(prompt)
    except Error:  # a larger vocabulary, which begins with bytes
        return "", ""
