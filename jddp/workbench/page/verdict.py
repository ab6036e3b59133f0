"""The verdict on a run: rules in order of severity, each a function of facts.

    verdict, *others = judge(facts)
    verdict.sentence       # "bound by input: 64 % of a step waits for data"

A rule returns a judgement, with its evidence and a next step, or None. Rules on learning may advise
the opposite of each other: only the first one that finds something is heard. A run on which no rule
finds anything is healthy, or too short to tell.
"""

from collections.abc import Callable

from jddp.workbench.charts import number
from jddp.workbench.page import learning, machines
from jddp.workbench.page.facts import Facts
from jddp.workbench.page.judgement import Judgement
from jddp.workbench.page.learning import FEWEST
from jddp.workbench.page.machines import SHORTEST, count_times


def judge(facts: Facts) -> tuple[Judgement, ...]:
    """All judgements on a run, the gravest first; at least one."""
    found = {rule: judgement for rule in RULES if (judgement := rule(facts))}
    for rule in [rule for rule in learning.TRENDS if rule in found][1:]:
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


RULES: tuple[Callable[[Facts], Judgement | None], ...] = (
    failed,
    learning.diverging,
    learning.frozen,
    learning.at_chance,
    learning.skipped,
    machines.memory_near_limit,
    machines.many_restarts,
    machines.slow_process,
    machines.slow_data,
    learning.overfitting,
    learning.undertrained,
    machines.long_pauses,
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
