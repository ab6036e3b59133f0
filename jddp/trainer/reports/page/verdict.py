"""The verdict on a run: rules in order of severity, each a function of facts.

    verdict, *others = judge(facts)
    verdict.sentence       # "bound by input: 64 % of a step waits for data"

A rule returns a judgement, with its evidence and a next step, or None. A run on which no rule finds
anything is healthy, or too short to tell.
"""

from collections.abc import Callable

from jddp.html.charts import number
from jddp.trainer.reports.page.facts import Facts
from jddp.trainer.reports.page.judgement import Judgement
from jddp.trainer.reports.page.learning import (
    FEWEST,
    at_chance,
    diverging,
    frozen,
    overfitting,
    skipped,
    undertrained,
)
from jddp.trainer.reports.page.machines import (
    count_times,
    long_pauses,
    many_restarts,
    memory_near_limit,
    slow_data,
    slow_process,
)


def judge(facts: Facts) -> tuple[Judgement, ...]:
    """All judgements on a run, the gravest first; at least one."""
    found = tuple(filter(None, (rule(facts) for rule in RULES)))
    return found or (too_short(facts) or healthy(facts),)


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


RULES: tuple[Callable[[Facts], Judgement | None], ...] = (
    failed,
    diverging,
    frozen,
    at_chance,
    skipped,
    memory_near_limit,
    many_restarts,
    slow_process,
    slow_data,
    overfitting,
    undertrained,
    long_pauses,
)


def too_short(facts: Facts) -> Judgement | None:
    """There are too few records for a verdict."""
    num_train = facts.records.num_train
    if num_train >= FEWEST:
        return None
    so_far = " so far" if facts.holder else ""
    return Judgement(
        "too short to tell",
        f"There are {num_train} records of training{so_far}, and a verdict needs {FEWEST}.",
        "Record more often (train.log_every_steps), or train longer.",
    )


def healthy(facts: Facts) -> Judgement:
    """Nothing is wrong, as far as rules can tell."""
    best = facts.best
    starts = count_times(max(1, len(facts.history.starts)))
    said = "healthy"
    if best is not None:
        said += f": best {facts.metric} {number(best.value)} at step {best.step:,}"
        is_last = best.step == facts.records.last_evaluation.get("step")
        said += "; still improving" if is_last and facts.records.num_evaluations > 2 else ""
    return Judgement(
        said,
        f"{facts.waiting_share:.1%} of a step waits for data. No step was skipped. The run was "
        f"started {starts}.",
        "Evaluate it on other data, or compare it with another run.",
        is_good=True,
    )
