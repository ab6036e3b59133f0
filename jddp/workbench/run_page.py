"""The page of a run: its verdict, three numbers, and their evidence, as one file of HTML.

    Path(run_dir, NAME).write_text(draw_run(read_facts(run_dir)))

Sections take the facts and return HTML, "" if the run has nothing of the kind: pictures first, then
lists of words. Parts that a run lacks are named at the end of the page.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from jddp.config.schema import default_of
from jddp.ground.typing import RESERVED
from jddp.trainer.reports.lines import duration
from jddp.workbench import charts
from jddp.workbench.facts import Facts, FailureCost, read_facts
from jddp.workbench.pages import draw_matrix, draw_scores, is_matrix, make_page, table
from jddp.workbench.verdict import Judgement, cost_of, in_gib, judge

MOST_CHARTS, MOST_DOTS, MOST_WARNINGS, MOST_CLASSES = 24, 60, 20, 40
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
_NO_METRICS = {*RESERVED, "host_seconds", "spike"}


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
            yield charts.curves(_beside(train.get(name), tests.get(name)), name)
    for title, (unit, names) in _OF_STEPS.items():
        found = {name: train[name] for name in names if name in train}
        if any(x.largest and x.largest.value for x in found.values()):  # More than zeros.
            shown = [
                charts.series_of(_SHORT.get(name, title), x, is_smoothed=title not in _NOT_NOISY)
                for name, x in found.items()
            ]
            yield charts.curves(shown, title, unit, may_be_logarithmic=title == "gradient norm")


def _beside(train: charts.Thinned | None, tests: charts.Thinned | None) -> list[charts.Series]:
    """The curves of training and of the evaluations; a few evaluations get dots."""
    shown = [charts.series_of("train", train, is_smoothed=True)] if train else []
    if tests:
        shown.append(charts.series_of("eval", tests, is_dotted=len(tests.values) <= MOST_DOTS))
    return shown


def draw_times(facts: Facts) -> str:
    """The running time, divided by activity."""
    records, history = facts.records, facts.history
    if not records.step_seconds:
        return ""
    waited = records.data_wait_seconds
    parts = {
        "computing and sending": records.step_seconds - waited,
        "waiting for data": waited,
        "evaluations and checkpoints": history.pause_seconds,
        "the rest: starting, compiling, steps taken again": history.seconds
        - records.step_seconds
        - history.pause_seconds,
    }
    step = charts.number(records.step_seconds / max(records.last_step, 1))
    note = f"A step takes {step} s, of which {facts.waiting_share:.1%} waits for data."
    trace = "train.profile_steps and jddp explain --trace show what a device does in it."
    return f'{charts.bar(parts, "s")}<p class="note">{note} {trace}</p>'


def draw_memory(facts: Facts) -> str:
    """The memory of a device, measured and predicted."""
    names = {
        "predicted for a step": "predicted_memory_bytes",
        "most that was used": "peak_memory_bytes",
        "limit": "memory_limit_bytes",
    }
    found = {name: facts.records.last_train.get(field) for name, field in names.items()}
    rows = [[name, in_gib(x)] for name, x in found.items() if charts.is_drawable(x)]
    peak, limit = found["most that was used"], found["limit"]
    if not charts.is_drawable(peak):
        return ""
    sizes = table(["a device", ""], rows, numbers={1})
    if not charts.is_drawable(limit):
        return sizes
    return sizes + charts.bar({"used": peak / 2**30, "free": (limit - peak) / 2**30}, "GiB")


def draw_events(facts: Facts) -> str:
    """The events of the run with their steps, and the last warnings in words."""
    found = facts.history.events
    shown: dict[str, Sequence[charts.Mark]] = {
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
    return charts.lanes(shown, facts.records.last_step) + words


def _saved(steps: Sequence[int]) -> list[charts.Mark]:
    return [charts.Mark(step, "a checkpoint that is still there") for step in steps]


def draw_classes(facts: Facts) -> str:
    """Metrics of the last evaluation that are arrays: for pairs of classes, classes, others."""
    names = facts.classes
    arrays = {k: x for k, x in facts.records.last_evaluation.items() if isinstance(x, list)}
    shown = ""
    for name, values in arrays.items():
        if is_matrix(values) and len(values) == len(names) <= MOST_CLASSES:
            shown += draw_matrix(name, values, names)
        elif all(x is None or charts.is_drawable(x) for x in values):
            is_of_classes = len(values) == len(names) <= MOST_CLASSES
            shown += (draw_scores if is_of_classes else _by_index)(name, values, names)
    if not shown:
        return ""
    step = facts.records.last_evaluation.get("step", 0)
    return f'<p class="note">At step {step:,}.</p><div class="charts">{shown}</div>'


def _by_index(name: str, values: Sequence[float | None], names: Sequence[str]) -> str:
    """A curve over the places of an array, such as the loss by position in a text."""
    found = {i: x for i, x in enumerate(values) if x is not None}
    return charts.curves([charts.Series(name, [*found], [*found.values()])], name, x="index")


_LONGEST = 200  # Maximum number of letters of a value.
MOST_STARTS = 50
MOST_EARLIER = 8  # Maximum number of texts below the newest one of a name.


def list_texts(facts: Facts) -> str:
    """The newest text of each name that callbacks have logged, and some earlier ones to unfold."""
    texts = facts.records.texts
    return "".join(f"<h3>{escape(name)}</h3>{_of_steps(found)}" for name, found in texts.items())


def _of_steps(texts: Mapping[int, str]) -> str:
    *earlier, newest = (
        f'<p class="note">step {step:,}</p><pre>{escape(text)}</pre>'
        for step, text in texts.items()
    )
    every = max(1, math.ceil(len(earlier) / MOST_EARLIER))
    shown = "".join(reversed(earlier[::every]))
    words = f"<details><summary>earlier</summary>{shown}</details>" if shown else ""
    return newest + words


def list_settings(facts: Facts) -> str:
    """The keys that differ from their defaults, and all keys."""
    if not facts.settings:
        return ""
    pairs = {key: (x, _default(key)) for key, x in facts.settings.items()}
    rows = [
        [f"<code>{escape(key)}</code>", _value(x), _value(default)]
        for key, (x, default) in pairs.items()
        if x not in (default, {})
    ]
    every = "\n".join(f"{key}: {x}" for key, x in facts.settings.items())
    return (
        f'<div class="wide">{table(["key", "value", "default"], rows)}</div>'
        f"<details><summary>all {len(pairs)} keys</summary><pre>{escape(every)}</pre></details>"
    )


def _default(key: str) -> object:
    """The default of a key; arguments of a named part have none."""
    return default_of(key, "" if ".kwargs." in key else "unknown to this version")


def _value(value: object) -> str:
    text = "null" if value is None else str(value)
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def list_environment(facts: Facts) -> str:
    """Versions, data and devices of the first start."""
    rows = [
        [escape(key), escape(", ".join(_facts(value)))]
        for key, value in facts.manifest.items()
        if key != "later_starts" and value
    ]
    return f'<div class="wide">{table(["", ""], rows)}</div>' if rows else ""


def _facts(value: object) -> Iterator[str]:
    """Values with their names, such as "jax 0.10.2"."""
    if isinstance(value, Mapping):
        for name, x in value.items():
            yield f"{name.replace('_', ' ')} {' '.join(_facts(x))}"
    elif isinstance(value, list):
        yield ", ".join(map(str, value))
    elif value is not None:
        yield str(value)


def list_starts(facts: Facts) -> str:
    """When and where the run was started last, how far it came, and the cost of failures."""
    starts, costs = facts.history.starts, [FailureCost(), *facts.history.costs]
    rows = [
        [
            f"{x.began:%Y-%m-%d %H:%M:%S}",
            escape(x.host),
            duration(x.seconds),
            f"{x.resumed_from:,}",
            f"{x.last_step:,}",
            cost_of(cost).replace("; ", "<br>"),
        ]
        for x, cost in zip(starts[-MOST_STARTS:], costs[-MOST_STARTS:], strict=False)
    ]
    heads = ["began", "host", "ran for", "from step", "to step", "cost of the failure before it"]
    return f'<div class="wide">{table(heads, rows, numbers={2, 3, 4})}</div>' if rows else ""


def list_missing(facts: Facts) -> str:
    """Lists the parts of the page that the run lacks, with the reasons."""
    found = [*facts.missing]
    if facts.records.num_strange:
        found.append(f"metrics.jsonl: {facts.records.num_strange} lines are no records")
    if facts.records.last_train and "peak_memory_bytes" not in facts.records.last_train:
        found.append("memory: these devices have no statistics of it")
    if facts.records.num_train and not facts.records.num_evaluations:
        found.append("evaluations: there is no record of one")
    items = "".join(f"<li>{escape(x)}</li>" for x in found)
    return f"<ul>{items}</ul>" if items else ""


NAME = "report.html"
_STYLE = """
.verdict { border-left: .35em solid #d9730d; padding: .1em 0 .1em .9em }
.verdict.good { border-color: #2f8f5b } .verdict h1 { margin: .2em 0 } .verdict p { margin: .3em 0 }
.numbers { display: flex; flex-wrap: wrap; gap: .4em 3em; margin: 1.2em 0 }
.numbers div { min-width: 8em; max-width: 24em }
.numbers b { display: block; font-size: 1.7em; line-height: 1.2 }
.charts { display: grid; gap: 1.2em 2em; grid-template-columns: repeat(auto-fill, minmax(min(100%,
  420px), 1fr)) }
.matrix { font-size: .85em } .matrix td { text-align: right; padding: .25em .4em; min-width: 1.8em }
.matrix th { border: 0; font-weight: normal }
code, pre { font: .92em ui-monospace, monospace } pre { overflow-x: auto; line-height: 1.5 }
h3 { font-size: 1em } summary { cursor: pointer } .wide td:last-child { white-space: normal }
@media print { .charts { grid-template-columns: 1fr 1fr } }
"""


def draw_run(facts: Facts) -> str:
    """Returns the page of a run as HTML."""
    parts = [_verdict(judge(facts)), _numbers(facts)]
    for title, section in SECTIONS.items():
        if html := section(facts):
            parts.append(f"<h2>{title}</h2>\n{html}")
    title = f"{Path(facts.name).absolute().name}: a run"
    return make_page(title, "\n".join(parts), style=charts.STYLE + _STYLE, script=charts.SCRIPT)


def page_of_run(run_dir: Path, name: str) -> dict[str, bytes]:
    """Returns the page of a run that this process has just ended, by the name of its file."""
    facts = read_facts(run_dir, name=name, is_over=True)
    return {NAME: draw_run(facts).encode(errors="replace")}


def _verdict(found: Sequence[Judgement]) -> str:
    """The gravest judgement as the heading; the others below it."""
    first, *others = found
    more = "".join(
        f"<li><b>{escape(x.sentence)}.</b> {escape(x.evidence)} {escape(x.next_step)}</li>"
        for x in others
    )
    return (
        f'<div class="verdict{" good" * first.is_good}"><h1>{escape(first.sentence)}</h1>'
        f"<p>{escape(first.evidence)}</p><p><b>Next:</b> {escape(first.next_step)}</p></div>"
        f"{f'<p>Also found:</p><ul>{more}</ul>' if more else ''}"
    )


def _numbers(facts: Facts) -> str:
    """Result, time and goodput."""
    shown = [_result(facts), _time(facts), _goodput(facts)]
    parts = (f"<div><b>{escape(x)}</b>{escape(words)}</div>" for x, words in shown)
    return f'<div class="numbers">{"".join(parts)}</div>'


def _result(facts: Facts) -> tuple[str, str]:
    if (best := facts.best) is None:
        return "-", "no evaluation"
    return charts.number(best.value, 4), f"best {facts.metric}, at step {best.step:,}"


def _time(facts: Facts) -> tuple[str, str]:
    seconds = facts.history.seconds or facts.records.step_seconds
    steps = f"for {facts.records.last_step:,} of {facts.num_steps:,} steps"
    return duration(seconds), steps + (f", running: {facts.holder}" if facts.holder else "")


def _goodput(facts: Facts) -> tuple[str, str]:
    if facts.goodput is None:
        return "-", "goodput: there is no log"
    cost = cost_of(facts.history.cost)
    words = f"; failures: {cost}" if cost else ""
    return f"{facts.goodput:.0%}", f"goodput: time in steps that were kept{words}"


# The sections below verdict and numbers, in order.
SECTIONS: dict[str, Callable[[Facts], str]] = {
    "Curves": draw_curves,
    "Where the time went": draw_times,
    "Memory": draw_memory,
    "Events": draw_events,
    "Classes and positions": draw_classes,
    "Texts that callbacks logged": list_texts,
    "Config: keys that differ from their defaults": list_settings,
    "Environment": list_environment,
    "Starts": list_starts,
    "Left out": list_missing,
}
