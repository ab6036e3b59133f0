"""Rules on how a run uses its machines: memory, restarts, slow processes, waiting for data.

Each takes the facts and returns a judgement or None; its thresholds stand above it.
"""

from jddp.workbench.charts import number
from jddp.workbench.page.facts import Facts
from jddp.workbench.page.judgement import Judgement

SHORTEST = 60.0  # seconds in steps, below which times are not judged
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


MANY_STARTS = 4
LOST = 0.1  # of the steps


def many_restarts(facts: Facts) -> Judgement | None:
    """The run was started often, or took many steps twice."""
    starts, lost = facts.history.starts, facts.history.lost_steps
    share = lost / max(facts.records.last_step, 1)
    if len(starts) < 2 or (len(starts) < MANY_STARTS and share < LOST):
        return None
    goodput = "" if facts.goodput is None else f" Goodput is {facts.goodput:.0%}."
    return Judgement(
        f"restarted {count_times(len(starts) - 1)}, with {lost:,} steps taken again",
        f"The steps taken again are {share:.0%} of {facts.records.last_step:,}.{goodput}",
        "See the end of each start in logs/process_0.log, and jddp doctor; save more often "
        "(checkpoint.every_steps).",
    )


SLOW_RECORDS = 1 / 3


def slow_process(facts: Facts) -> Judgement | None:
    """The processes wait for one of them."""
    records = facts.records
    if not records.slow or records.step_seconds < SHORTEST:
        return None
    (slow, times), *_ = records.slow.most_common(1)
    if times < max(3, SLOW_RECORDS * records.num_train):
        return None
    where = f" on {slow.host}" if slow.host else ""
    remedies = {
        "data": "Look at the disk and the processor of that host; data.num_workers reads ahead.",
        "compute": "Look at that GPU's clock and temperature, and for others that use it.",
    }
    return Judgement(
        f"process {slow.process} is {records.slow_ratio:.1f} times slower, in {slow.phase}",
        f"The others wait for it{where}, in {times:,} of {records.num_train:,} records.",
        remedies.get(slow.phase, "Look at what else runs on that host, and at its disk."),
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


PAUSED = 1 / 3  # of the running time


def long_pauses(facts: Facts) -> Judgement | None:
    """Evaluations and checkpoints take much of the running time."""
    history = facts.history
    if history.seconds < SHORTEST or history.pause_seconds < PAUSED * history.seconds:
        return None
    share = history.pause_seconds / history.seconds
    return Judgement(
        f"evaluations and checkpoints take {share:.0%} of the time",
        f"They took {number(history.pause_seconds)} of {number(history.seconds)} s.",
        "Evaluate and save less often (train.eval_every_steps, checkpoint.every_steps).",
    )


def count_times(number: int) -> str:
    """A number of times in words: "once", "4 times"."""
    return "once" if number == 1 else f"{number:,} times"


def in_gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.1f} GiB"
