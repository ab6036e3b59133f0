"""The sections of a run's page that are words: texts, config, environment, starts, commands.

Each takes the facts and returns HTML, "" if the run has nothing of the kind.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from html import escape

from jddp.config.schema import default_of
from jddp.workbench.page.facts import Facts
from jddp.workbench.pages import table

_LONGEST = 200  # letters of a value
MOST_STARTS = 50
MOST_EARLIER = 8  # texts of a name, below its newest one


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
    """When and where the run was started last, and how far each start came."""
    rows = [
        [
            f"{x.began:%Y-%m-%d %H:%M:%S}",
            escape(x.host),
            duration(x.seconds),
            f"{x.resumed_from:,}",
            f"{x.last_step:,}",
        ]
        for x in facts.history.starts[-MOST_STARTS:]
    ]
    heads = ["began", "host", "ran for", "from step", "to step"]
    return f'<div class="wide">{table(heads, rows, numbers={2, 3, 4})}</div>' if rows else ""


def list_commands(facts: Facts) -> str:
    """Commands to continue with, for this run."""
    run = shlex.quote(facts.name)
    lines = {
        f"jddp report {run}": "make this page again",
        f"jddp evaluate {run}": "evaluate its newest checkpoint",
        f"jddp compare {run} OTHER": "compare it with other runs",
        f"jddp checkpoint verify {run}": "verify its checkpoints",
    }
    if facts.settings:
        train = {f"jddp train --config {run}/config.yaml": "continue it, or begin another like it"}
        rows = {f"jddp data rows {run} --step 1": "list the examples of a step"}
        lines = train | lines | rows
    width = max(map(len, lines))
    text = "\n".join(f"{line:<{width}}  # {about}" for line, about in lines.items())
    return f"<pre>{escape(text)}</pre>"


def list_missing(facts: Facts) -> str:
    """What the run does not have, with the reasons."""
    found = [*facts.missing]
    if facts.records.num_strange:
        found.append(f"metrics.jsonl: {facts.records.num_strange} lines are no records")
    if facts.records.every > 1:
        found.append(f"train records: of a file so long, one in {facts.records.every} is read")
    if facts.records.last_train and "peak_memory_bytes" not in facts.records.last_train:
        found.append("memory: these devices have no statistics of it")
    if facts.examples is None:
        found.append("test examples: jddp report --examples runs the model on them")
    if facts.records.num_train and not facts.records.num_evaluations:
        found.append("evaluations: there is no record of one")
    items = "".join(f"<li>{escape(x)}</li>" for x in found)
    return f"<ul>{items}</ul>" if items else ""


def duration(seconds: float) -> str:
    """A time as hours, minutes and seconds: "2:31", "1:02:31"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
