"""The page of a run: its verdict, three numbers, and what is behind them, as one file of HTML.

    Path(run_dir, NAME).write_text(draw_run(read_facts(run_dir)))

What a run does not have is left out, and named at the end of the page.
"""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from jddp.workbench.charts import SCRIPT, number
from jddp.workbench.charts import STYLE as OF_CHARTS
from jddp.workbench.page import about, pictures
from jddp.workbench.page.examples import draw_examples
from jddp.workbench.page.facts import Facts, read_facts
from jddp.workbench.page.verdict import Judgement, judge
from jddp.workbench.pages import make_page

NAME = "report.html"
_STYLE = """
.verdict { border-left: .35em solid #d9730d; padding: .1em 0 .1em .9em }
.verdict.good { border-color: #2f8f5b } .verdict h1 { margin: .2em 0 } .verdict p { margin: .3em 0 }
.numbers { display: flex; flex-wrap: wrap; gap: .4em 3em; margin: 1.2em 0 }
.numbers div { min-width: 8em } .numbers b { display: block; font-size: 1.7em; line-height: 1.2 }
.charts { display: grid; gap: 1.2em 2em; grid-template-columns: repeat(auto-fill, minmax(min(100%,
  420px), 1fr)) }
.matrix { font-size: .85em } .matrix td { text-align: right; padding: .25em .4em; min-width: 1.8em }
.matrix th { border: 0; font-weight: normal }
code, pre { font: .92em ui-monospace, monospace } pre { overflow-x: auto; line-height: 1.5 }
.mistakes { display: grid; gap: .8em; grid-template-columns: repeat(auto-fill, minmax(7em, 1fr)) }
.mistakes figure { margin: 0; font-size: .85em } .mistakes img { width: 100%;
  image-rendering: pixelated }
h3 { font-size: 1em }
summary { cursor: pointer }
@media print { .charts { grid-template-columns: 1fr 1fr } }
"""


def draw_run(facts: Facts) -> str:
    """Returns the page of a run as HTML."""
    parts = [_verdict(judge(facts)), _numbers(facts)]
    for title, section in SECTIONS.items():
        if html := section(facts):
            parts.append(f"<h2>{title}</h2>\n{html}")
    name = Path(facts.name).absolute().name
    return make_page(f"{name}: a run", "\n".join(parts), style=OF_CHARTS + _STYLE, script=SCRIPT)


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
    return number(best.value, 4), f"best {facts.metric}, at step {best.step:,}"


def _time(facts: Facts) -> tuple[str, str]:
    seconds = facts.history.seconds or facts.records.step_seconds
    steps = f"for {facts.records.last_step:,} of {facts.num_steps:,} steps"
    return about.duration(seconds), steps + (f", running: {facts.holder}" if facts.holder else "")


def _goodput(facts: Facts) -> tuple[str, str]:
    if facts.goodput is None:
        return "-", "goodput: there is no log"
    return f"{facts.goodput:.0%}", "goodput: time in steps that were kept"


def _examples(facts: Facts) -> str:
    return draw_examples(facts.examples, facts.classes) if facts.examples else ""


# The sections below verdict and numbers, in order.
SECTIONS: dict[str, Callable[[Facts], str]] = {
    "Curves": pictures.draw_curves,
    "Where the time went": pictures.draw_times,
    "Memory": pictures.draw_memory,
    "What a step sends, bucket by bucket": pictures.draw_plan,
    "Events": pictures.draw_events,
    "Classes and positions": pictures.draw_classes,
    "Texts that callbacks logged": about.list_texts,
    "Test examples": _examples,
    "Config: keys that differ from their defaults": about.list_settings,
    "Environment": about.list_environment,
    "Starts": about.list_starts,
    "Commands": about.list_commands,
    "Left out": about.list_missing,
}
