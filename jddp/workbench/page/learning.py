"""Rules on what a run has learned: is the loss finite, does it fall, and where will it help?

Each takes the facts and returns a judgement or None; its thresholds stand above it.
"""

import math
import statistics

from jddp.workbench.charts import number, smoothed
from jddp.workbench.page.facts import Facts
from jddp.workbench.page.judgement import Judgement
from jddp.workbench.thinned import At

FEWEST = 10  # train records, below which a loss is not judged
RISE = 0.5  # of what the loss had fallen by
NOISE = 3.0  # times the typical distance of a loss from its smoothed curve


def diverging(facts: Facts) -> Judgement | None:
    """The loss ends far above its lowest value, or is not finite."""
    loss = facts.records.train.get("loss")
    remedy = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or clip gradients "
    remedy += "(ddp.max_grad_norm)."
    if loss is not None and loss.last is None and not facts.records.last("skipped"):
        finite = loss.steps[-1] if loss.steps else 0
        return Judgement(
            f"diverging: the loss is not finite after step {finite:,}",
            f"No record from there to step {facts.records.last_step:,} has a finite loss.",
            f"{remedy} nonfinite/ has diagnostics of the step.",
        )
    if loss is None or len(loss.values) < FEWEST:
        return None
    smooth = smoothed(loss.values, max(3, len(loss.values) / 40))
    lowest, end = min(smooth), _end(smooth)
    noise = NOISE * _noise(loss.values, smooth)
    if end - lowest <= max(RISE * (smooth[0] - lowest), noise, 0.1 * abs(lowest)):
        return None
    at = loss.steps[smooth.index(lowest)]
    return Judgement(
        "diverging: the training loss rises again",
        f"The loss was {number(lowest)} at step {at:,} and is {number(end)} at the end.",
        remedy,
    )


STILL = 1e-3  # the spread of the loss, of its mean


def frozen(facts: Facts) -> Judgement | None:
    """The loss does not move."""
    loss = facts.records.train.get("loss")
    if loss is None or len(loss.values) < FEWEST or not (loss.largest and loss.smallest):
        return None
    spread = loss.largest.value - loss.smallest.value
    if spread > STILL * abs(loss.values[-1]):
        return None
    return Judgement(
        "frozen: the training loss does not move",
        f"It is {number(loss.values[-1], 4)} in all of {facts.records.num_train:,} records, within "
        f"{number(spread)}.",
        "Look for a learning rate of 0, frozen parameters (ddp.frozen), a loss that does not "
        "depend on the parameters, and the same batch at each step; jddp.diagnose shows norms.",
    )


GUESSING = 1.2  # times the accuracy of guessing, or 3 standard errors above it
OF_RANDOM = 0.98  # times the loss of guessing among tokens


def at_chance(facts: Facts) -> Judgement | None:
    """The best accuracy, or the loss of a language model, is that of guessing."""
    if facts.records.num_train < FEWEST:
        return None
    guessed = _guessed_class(facts) or _guessed_token(facts)
    if not guessed:
        return None
    return Judgement(
        f"at chance: {guessed}",
        f"That holds for the best of {facts.records.num_evaluations:,} evaluations.",
        "Look at a batch: are inputs and labels of the same examples, and inputs scaled? Then try "
        "a tenth and ten times optimizer.learning_rate, and learn one batch by heart.",
    )


def _guessed_class(facts: Facts) -> str:
    accuracy = facts.records.evaluations.get("accuracy")
    num_classes = len(facts.classes)
    if accuracy is None or accuracy.largest is None or num_classes < 2:
        return ""
    chance = 1 / num_classes
    error = math.sqrt(chance * (1 - chance) / facts.records.num_examples)
    if accuracy.largest.value > max(GUESSING * chance, chance + 3 * error):
        return ""
    value = number(accuracy.largest.value)
    return f"accuracy {value} is that of guessing among {num_classes} classes"


def _guessed_token(facts: Facts) -> str:
    loss = facts.records.evaluations.get("loss")
    size = facts.settings.get("model.kwargs.vocab_size")
    if loss is None or loss.smallest is None or not isinstance(size, int) or size < 2:
        return ""
    if loss.smallest.value < OF_RANDOM * math.log(size):
        return ""
    return f"loss {number(loss.smallest.value)} is that of guessing among {size:,} tokens"


MOST_SKIPPED = 0.01  # of the steps, where skipping is a means: of a loss scale, or against spikes


def skipped(facts: Facts) -> Judgement | None:
    """Steps were left out: they were not finite, or their loss was a spike."""
    records = facts.records
    share = records.last("skipped") / max(records.last_step, 1)
    skips_spikes = facts.settings.get("train.on_spike") == "skip"
    if share <= (MOST_SKIPPED if skips_spikes or "loss_scale" in records.train else 0):
        return None
    why = "NaN, infinite or spikes" if skips_spikes else "NaN or infinite"
    return Judgement(
        f"{records.last('skipped'):,.0f} steps were skipped",
        f"In {share:.1%} of {records.last_step:,} steps, loss or gradients were {why}.",
        "Look into nonfinite/ for the layers and the examples; then mask or clean these examples, "
        "lower optimizer.learning_rate, or clip gradients (ddp.max_grad_norm).",
    )


WORSE = 0.05


def overfitting(facts: Facts) -> Judgement | None:
    """The loss of evaluations rises, while that of training falls."""
    best, train = _best_before_the_end(facts), facts.records.train.get("loss")
    if best is None or train is None or facts.records.num_train < FEWEST:
        return None
    end = _end(facts.records.evaluations["loss"].values)
    later = [x for step, x in zip(train.steps, train.values, strict=True) if step > best.step]
    if end - best.value < WORSE * abs(best.value) or not later:
        return None
    if _end(later) >= _end(later[::-1]):
        return None
    return Judgement(
        f"overfitting since step {best.step:,}",
        f"The evaluation loss rises from {number(best.value)} to {number(end)}, while the training "
        f"loss falls to {number(_end(later))}.",
        "Keep the best state (checkpoint.best_metric=loss) or stop there (the callback "
        "early_stopping); augment more, raise the weight decay, or add data.",
    )


STILL_FALLING = 0.15  # of the fall of the loss, in the last quarter of the steps


def undertrained(facts: Facts) -> Judgement | None:
    """The run ends while its loss still falls fast."""
    loss = facts.records.train.get("loss")
    if facts.holder or facts.records.last_step < facts.num_steps or _best_before_the_end(facts):
        return None
    if loss is None or len(loss.values) < FEWEST:
        return None
    smooth = smoothed(loss.values, max(3, len(loss.values) / 20))
    fall, late = smooth[0] - smooth[-1], smooth[3 * len(smooth) // 4] - smooth[-1]
    if fall <= NOISE * _noise(loss.values, smooth) or late < STILL_FALLING * fall:
        return None
    return Judgement(
        "undertrained: the loss still falls fast at the end",
        f"The last quarter of the steps brought {late / fall:.0%} of the fall of the loss, from "
        f"{number(smooth[0])} to {number(smooth[-1])}.",
        f"Train longer (train.num_steps={2 * facts.records.last_step}), or raise "
        "optimizer.learning_rate.",
    )


# They may advise the opposite of each other: the first that finds something is heard alone.
TRENDS = (diverging, frozen, at_chance, overfitting, undertrained)


def _best_before_the_end(facts: Facts) -> At | None:
    """The lowest loss of the evaluations, if it is not one of the last."""
    tests = facts.records.evaluations.get("loss")
    if tests is None or tests.smallest is None or len(tests.values) < 4:
        return None
    return tests.smallest if tests.smallest.step <= 0.9 * facts.records.last_step else None


def _noise(values: list[float], smooth: list[float]) -> float:
    """The typical distance of values from their smoothed curve."""
    return statistics.median(abs(a - b) for a, b in zip(values, smooth, strict=True))


def _end(values: list[float]) -> float:
    """The mean of the last tenth of the values."""
    return statistics.fmean(values[-max(1, len(values) // 10) :])
