"""The sections of a run's page that are pictures: curves, time, memory, events and classes.

Each takes the facts and returns HTML, "" if the run has nothing of the kind.
"""

from collections.abc import Iterator, Sequence
from html import escape

from jddp.ground.typing import RESERVED
from jddp.workbench.charts import (
    Mark,
    Series,
    Thinned,
    bar,
    curves,
    is_drawable,
    lanes,
    number,
    series_of,
)
from jddp.workbench.page.facts import Facts
from jddp.workbench.page.verdict import in_gib
from jddp.workbench.pages import draw_matrix, draw_scores, is_matrix, table

MOST_CHARTS, MOST_DOTS, MOST_WARNINGS, MOST_BUCKETS, MOST_CLASSES = 24, 60, 20, 30, 40
# Charts below the charts of metrics, by title: their unit and their fields.
_OF_STEPS = {
    "gradient norm": ("", ["grad_norm"]),
    "learning rate": ("", ["learning_rate"]),
    "time of a step": ("s", ["step_seconds", "data_wait_seconds", "host_seconds"]),
    "tokens per second": ("", ["tokens_per_second"]),
    "examples per second": ("", ["examples_per_second"]),
    "model FLOPs per second": ("", ["model_flops_per_second"]),
    "MFU": ("", ["mfu"]),
    "peak memory": ("bytes", ["peak_memory_bytes"]),
    "loss scale": ("", ["loss_scale"]),
    "skipped steps": ("", ["skipped"]),
}
_SHORT = {"step_seconds": "step", "data_wait_seconds": "waiting for data", "host_seconds": "host"}
_NOT_NOISY = {"learning rate", "loss scale", "skipped steps", "peak memory"}
_NO_METRICS = {*RESERVED, "slowest_ratio", "host_seconds", "spike"}


def draw_curves(facts: Facts) -> str:
    """Curves of the loss and of each metric, train and eval in one chart, and of step records."""
    drawn = [*filter(None, _charts(facts))]
    more = len(drawn) - MOST_CHARTS
    note = f'<p class="note">{more} more curves are in metrics.jsonl.</p>' if more > 0 else ""
    return f'<div class="charts">{"".join(drawn[:MOST_CHARTS])}</div>{note}' if drawn else ""


def _charts(facts: Facts) -> Iterator[str]:
    train, tests = facts.records.train, facts.records.evaluations
    for name in dict.fromkeys(["loss", *tests, *train]):
        if name == "loss" or name not in _NO_METRICS:
            yield curves(_beside(train.get(name), tests.get(name)), name)
    for title, (unit, names) in _OF_STEPS.items():
        found = {name: train[name] for name in names if name in train}
        if any(map(_is_more_than_zeros, found.values())):
            shown = [
                series_of(_SHORT.get(name, title), curve, is_smoothed=title not in _NOT_NOISY)
                for name, curve in found.items()
            ]
            yield curves(shown, title, unit, may_be_logarithmic=title == "gradient norm")


def _beside(train: Thinned | None, tests: Thinned | None) -> list[Series]:
    """The curves of training and of the evaluations; a few evaluations get dots."""
    shown = [series_of("train", train, is_smoothed=True)] if train else []
    if tests:
        shown.append(series_of("eval", tests, is_dotted=len(tests.values) <= MOST_DOTS))
    return shown


def _is_more_than_zeros(curve: Thinned) -> bool:
    return curve.largest is not None and curve.largest.value != 0


def draw_times(facts: Facts) -> str:
    """The running time, divided by activity."""
    records, history = facts.records, facts.history
    if not records.step_seconds:
        return ""
    waited = records.data_wait_seconds
    traced = records.train.get("exposed_communication")
    exposed = traced.values[-1] if traced and traced.values else 0.0  # of the newest traced steps
    working = records.step_seconds - waited
    parts = {
        "computing" if exposed else "computing and sending": working * (1 - exposed),
        "waiting for communication, in traced steps": working * exposed,
        "waiting for data": waited,
        "evaluations and checkpoints": history.pause_seconds,
        "the rest: starting, compiling, steps taken again": history.seconds
        - records.step_seconds
        - history.pause_seconds,
    }
    step = records.step_seconds / max(records.last_step, 1)
    note = f"A step takes {number(step)} s, of which {facts.waiting_share:.1%} waits for data."
    trace = "train.profile_steps and jddp explain --trace show what a device does in it."
    return f'{bar(parts, "s")}<p class="note">{note} {trace}</p>'


def draw_memory(facts: Facts) -> str:
    """The memory of a device, measured and predicted."""
    names = {
        "predicted for a step": "predicted_memory_bytes",
        "most that was used": "peak_memory_bytes",
        "limit": "memory_limit_bytes",
    }
    found = {name: facts.records.last_train.get(field) for name, field in names.items()}
    rows = [[name, in_gib(x)] for name, x in found.items() if is_drawable(x)]
    peak, limit = found["most that was used"], found["limit"]
    if not is_drawable(peak):
        return ""
    whole = {"used": peak, "free": limit - peak} if is_drawable(limit) else {}
    shares = {name: x / 2**30 for name, x in whole.items()}
    return table(["a device", ""], rows, numbers={1}) + (bar(shares, "GiB") if shares else "")


def draw_plan(facts: Facts) -> str:
    """The buckets in which a step sends gradients, in order."""
    sizes = {
        f"{number} {' .. '.join(dict.fromkeys(x['paths']))}": x["bytes"] / 2**20
        for number, x in enumerate(facts.buckets[:MOST_BUCKETS])
    }
    if not sum(sizes.values()):
        return ""
    more = len(facts.buckets) - MOST_BUCKETS
    note = f"{more} more buckets follow. " if more > 0 else ""
    note += "jddp explain compiles the step, and lists when each is sent."
    return f'{bar(sizes, "MiB")}<p class="note">{note}</p>'


def draw_events(facts: Facts) -> str:
    """The events of the run with their steps, and the last warnings in words."""
    found = facts.history.events
    shown: dict[str, Sequence[Mark]] = {
        "resumed": found.get("resumed", ()),
        "skipped steps": found.get("skipped", ()),
        "loss spikes": found.get("spike", ()),
        "checkpoints": _saved(facts.checkpoints["checkpoints"]),
        "best": _saved(facts.checkpoints["best"]),
        "signals": [*found.get("signal", ()), *found.get("stopped", ())],
        "warnings": found.get("warning", ()),
    }
    warned = "".join(
        f"<li>step {mark.step:,}: {escape(mark.text)}</li>"
        for mark in found.get("warning", ())[-MOST_WARNINGS:]
    )
    words = f"<details><summary>warnings</summary><ul>{warned}</ul></details>" if warned else ""
    return lanes(shown, facts.records.last_step) + words


def _saved(steps: Sequence[int]) -> list[Mark]:
    return [Mark(step, "a checkpoint that is still there") for step in steps]


def draw_classes(facts: Facts) -> str:
    """Metrics of the last evaluation that are arrays: for pairs of classes, classes, others."""
    names = facts.classes
    arrays = {k: x for k, x in facts.records.last_evaluation.items() if isinstance(x, list)}
    parts = list[str]()
    for name, values in arrays.items():
        if is_matrix(values) and len(values) == len(names) <= MOST_CLASSES:
            parts.append(draw_matrix(name, values, names))
        elif all(x is None or is_drawable(x) for x in values):
            is_of_classes = len(values) == len(names) <= MOST_CLASSES
            parts.append((draw_scores if is_of_classes else _by_index)(name, values, names))
    step = facts.records.last_evaluation.get("step", 0)
    shown = "".join(filter(None, parts))
    return (
        f'<p class="note">At step {step:,}.</p><div class="charts">{shown}</div>' if shown else ""
    )


def _by_index(name: str, values: Sequence[float | None], names: Sequence[str]) -> str:
    """A curve over the places of an array, such as the loss by position in a text."""
    found = {i: x for i, x in enumerate(values) if x is not None}
    return curves([Series(name, [*found], [*found.values()])], name, x="index")
