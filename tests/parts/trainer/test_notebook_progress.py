"""Progress in a notebook: one element that is replaced now and then, and at the end."""

import logging
import math
import re
import sys
from types import SimpleNamespace

import pytest

from jddp.trainer.reports import notebook
from jddp.trainer.reports.lines import Course
from jddp.trainer.reports.notebook import NotebookProgress, make_progress
from jddp.trainer.reports.progress import Progress

ODD = "<script>x"


@pytest.fixture
def clock(monkeypatch):
    """The time, which stands still."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(notebook, "time", clock)
    return clock


def train(step, loss=0.5, **more):
    return {"step": step, "split": "train", "loss": loss, **more}


def evaluation(step, loss):
    return {"step": step, "split": "eval", "loss": loss, "examples": 10.0}


def test_it_is_replaced_once_a_second_and_at_the_end(clock):
    shown = []
    progress = NotebookProgress(Course(100), lambda html, text: shown.append(text))
    assert shown == ["compiling"]
    for step in range(1, 41):
        clock.now += 0.1
        progress.log(train(step, step_seconds=0.1))
    assert len(shown) == 4 or len(shown) == 5  # of rounded sums
    progress.close()
    assert shown[-1] == "step 40/100  loss 0.5  ETA 0:06"
    progress.close()
    progress.log(train(41))
    assert shown[-1] == "step 40/100  loss 0.5  ETA 0:06"


def test_it_shows_a_bar_both_newest_lines_and_the_curves_of_both_splits(clock):
    shown = []
    progress = NotebookProgress(Course(100), lambda html, text: shown.append(html))
    assert "<svg" not in shown[0]
    for step in (10, 20, 30):
        progress.log(train(step, 1 / step))
    progress.log(evaluation(30, 0.25))
    progress.log(evaluation(40, math.nan))
    progress.close()
    assert 'aria-valuenow="40%"' in shown[-1]
    assert "step 30/100  loss 0.03333" in shown[-1]
    assert "eval 40  loss nan" in shown[-1]
    assert shown[-1].count("<svg") == 1
    assert re.findall(r"</i>(\w+)</span>", shown[-1]) == ["train", "eval"]


def test_the_loss_and_the_first_metric_have_a_chart_and_names_are_escaped(clock):
    shown = []
    progress = NotebookProgress(Course(100), lambda html, text: shown.append(html))
    progress.log({"step": 1, "split": "train", ODD: 0.5, "accuracy": 0.5, "loss": 1.0})
    progress.close()
    assert re.findall(r"<b>(.+?)</b>", shown[-1]) == ["loss", "&lt;script&gt;x"]
    assert ODD not in shown[-1]


def test_a_front_end_that_fails_is_reported_once_and_the_run_continues(clock, caplog, capsys):
    def fail(html, text):
        raise RuntimeError("comm closed")

    with caplog.at_level(logging.WARNING, "jddp"):
        progress = NotebookProgress(Course(100), fail)
        progress.log(train(1))
        progress.note("a sentence")
        progress.close()
    assert [x.message for x in caplog.records] == [
        "The notebook cannot show progress: RuntimeError('comm closed')"
    ]
    assert capsys.readouterr().out == "a sentence\n"


def test_it_is_chosen_in_a_kernel_alone_and_on_process_0(monkeypatch):
    assert isinstance(make_progress(Course(1), is_writer=True), Progress)
    shell = SimpleNamespace()  # IPython on a terminal
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(make_progress(Course(1), is_writer=True), Progress)
    shell.kernel = object()
    monkeypatch.setattr(notebook, "_element", lambda: lambda html, text: None)
    assert isinstance(make_progress(Course(1), is_writer=True), NotebookProgress)
    assert isinstance(make_progress(Course(1), is_writer=False), Progress)
