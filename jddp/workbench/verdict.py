"""The verdict on a run: rules in order of severity, each a function of facts.

    verdict, *others = judge(facts)
    verdict.sentence       # "bound by input: 64 % of a step waits for data"

A rule returns a judgement, with its evidence and a next step, or None. Rules on learning may advise
the opposite of each other: only the first one that finds something is heard. A run on which no rule
finds anything is healthy, or too short to tell.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from jddp.workbench.charts import At, number, smoothed
from jddp.workbench.facts import Facts, FailureCost

FEWEST = 10  # Minimum number of train records for a loss to be judged.
SHORTEST = 60.0  # Minimum time in steps for times to be judged.


@dataclass(frozen=True)
class Judgement:
    """The judgement of a rule.

    Attributes:
      sentence: Judgement in one line.
      evidence: The numbers behind it.
      next_step: Advice for the user.
      is_good: Whether nothing is wrong.
    """

    sentence: str
    evidence: str
    next_step: str
    is_good: bool = False


def judge(facts: Facts) -> tuple[Judgement, ...]:
    """All judgements on a run, the gravest first; at least one."""
    found = {rule: judgement for rule in RULES if (judgement := rule(facts))}
    for rule in [rule for rule in TRENDS if rule in found][1:]:
        del found[rule]
    short = too_short(facts, "judge its times" if found else "tell")
    return (*found.values(), *filter(None, [short])) or (healthy(facts),)


def failed(facts: Facts) -> Judgement | None:
    """An exception, or the failure of a process, has ended the run."""
    if facts.holder or not (facts.failure or facts.history.error):
        return None
    steps = facts.checkpoints["checkpoints"]
    way = f"the same command resumes from step {steps[-1]:,}" if steps else "start it again"
    return Judgement(
        f"ended by an error after step {facts.records.last_step:,} of {facts.num_steps:,}",
        facts.failure or facts.history.error,
        f"Fix the cause; {way}. The traceback is in logs/.",
    )


def too_short(facts: Facts, to_do: str) -> Judgement | None:
    """There are too few records for a verdict, or too few seconds for one on times."""
    num_train, seconds = facts.records.num_train, facts.records.step_seconds
    if num_train >= FEWEST and not 0 < seconds < SHORTEST:
        return None
    return Judgement(
        f"too short to {to_do}",
        f"Records of training: {num_train}, in {seconds:.0f} s of steps. A verdict on the loss "
        f"needs {FEWEST}, one on times {SHORTEST:.0f} s.",
        "Train longer, or record more often (train.log_every_steps).",
    )


RISE = 0.5  # Share of the loss's earlier fall.
NOISE = 3.0  # Multiple of the typical distance of a loss from its smoothed curve.


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
    noise = NOISE * statistics.median(abs(a - b) for a, b in zip(loss.values, smooth, strict=True))
    if end - lowest <= max(RISE * (smooth[0] - lowest), noise, 0.1 * abs(lowest)):
        return None
    at = loss.steps[smooth.index(lowest)]
    return Judgement(
        "diverging: the training loss rises again",
        f"The loss was {number(lowest)} at step {at:,} and is {number(end)} at the end.",
        remedy,
    )


GUESSING = 1.2  # Multiple of the accuracy of guessing; 3 standard errors above it if that is more.
OF_RANDOM = 0.98  # Multiple of the loss of guessing among tokens.


def at_chance(facts: Facts) -> Judgement | None:
    """The best accuracy, or the loss of a language model, is no better than guessing."""
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
    return f"accuracy {value} is no better than guessing among {num_classes} classes"


def _guessed_token(facts: Facts) -> str:
    loss = facts.records.evaluations.get("loss")
    size = facts.settings.get("model.kwargs.vocab_size")
    if loss is None or loss.smallest is None or not isinstance(size, int) or size < 2:
        return ""
    if loss.smallest.value < OF_RANDOM * math.log(size):
        return ""
    return f"loss {number(loss.smallest.value)} is no better than guessing among {size:,} tokens"


MOST_SKIPPED = 0.01  # Largest share of steps that a loss scale or `train.on_spike` may skip.


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
    """The loss of evaluations rises while the training loss falls."""
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


# Trends may advise the opposite of each other: only the first one that finds something is heard.
TRENDS = (diverging, at_chance, overfitting)


def _best_before_the_end(facts: Facts) -> At | None:
    """The lowest loss of the evaluations, if it is not one of the last."""
    tests = facts.records.evaluations.get("loss")
    if tests is None or tests.smallest is None or len(tests.values) < 4:
        return None
    return tests.smallest if tests.smallest.step <= 0.9 * facts.records.last_step else None


def _end(values: list[float]) -> float:
    """The mean of the last tenth of the values."""
    return statistics.fmean(values[-max(1, len(values) // 10) :])


NEARLY_FULL = 0.92


def memory_near_limit(facts: Facts) -> Judgement | None:
    """A device has little memory left."""
    last = facts.records.last
    peak, limit = last("peak_memory_bytes"), last("memory_limit_bytes")
    if not limit or peak < NEARLY_FULL * limit:
        return None
    return Judgement(
        f"memory is nearly full: {peak / limit:.0%} of a device's is taken",
        f"At most {in_gib(peak)} of {in_gib(limit)} were used. A larger batch or other fragments "
        "would end the run.",
        "Take ddp.accumulate_steps=2, or divide the state (ddp.strategy=zero1 or fsdp); jddp "
        "explain lists what takes the memory.",
    )


COSTLY = 0.1


def costly_failures(facts: Facts) -> Judgement | None:
    """A large share of the time, in which the run was running or down, went into failures."""
    history, cost = facts.history, facts.history.cost
    seconds = history.seconds + cost.pause_seconds - cost.step_seconds
    share = (cost.lost_seconds + cost.pause_seconds) / (seconds or 1)
    if share < COSTLY or facts.records.step_seconds < SHORTEST:
        return None
    return Judgement(
        f"failures cost {share:.0%} of the time",
        f"In all: {cost_of(cost)}.",
        "Look for their causes in logs/. Save more often (checkpoint.every_steps) where steps are "
        "lost, and let jddp launch --max-restarts start the run again.",
    )


def cost_of(cost: FailureCost) -> str:
    """The cost of failures in words; "" if there was none."""
    if not any(cost):
        return ""
    return (
        f"lost {cost.lost_steps:,} steps ({cost.lost_seconds:,.1f} s); "
        f"{cost.pause_seconds:,.1f} s until the next step: {cost.down_seconds:,.1f} down, "
        f"{cost.start_seconds:,.1f} start, {cost.restore_seconds:,.1f} restore, "
        f"{cost.step_seconds:,.1f} first step"
    )


WAITING = 0.1


def slow_data(facts: Facts) -> Judgement | None:
    """Steps wait for data."""
    records, share = facts.records, facts.waiting_share
    if share < WAITING or records.num_train < 3 or records.step_seconds < SHORTEST:
        return None
    waited = number(records.data_wait_seconds)
    return Judgement(
        f"bound by input: {share:.0%} of a step waits for data",
        f"{waited} s of {number(records.step_seconds)} s in steps were spent waiting.",
        "Read ahead with data.num_workers=4, keep decoded data, or augment less.",
    )


RULES: tuple[Callable[[Facts], Judgement | None], ...] = (
    failed,
    diverging,
    at_chance,
    skipped,
    memory_near_limit,
    costly_failures,
    slow_data,
    overfitting,
)


def healthy(facts: Facts) -> Judgement:
    """Nothing is wrong, as far as rules can tell."""
    best = facts.best
    num_starts = max(1, len(facts.history.starts))
    times = "once" if num_starts == 1 else f"{num_starts:,} times"
    said = "healthy"
    if best is not None:
        said += f": best {facts.metric} {number(best.value)} at step {best.step:,}"
        is_last = best.step == facts.records.last_evaluation.get("step")
        said += "; still improving" if is_last and facts.records.num_evaluations > 2 else ""
    return Judgement(
        said,
        f"{facts.waiting_share:.1%} of a step waits for data. No step was skipped. The run was "
        f"started {times}.",
        "Evaluate it on other data, or compare it with another run.",
        is_good=True,
    )


def in_gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.1f} GiB"
