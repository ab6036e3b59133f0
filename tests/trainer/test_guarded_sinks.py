"""Sinks: found by name before training, and kept from doing any harm to it."""

import importlib.util
import logging
import sys
import threading

import pytest

from jddp.ground.errors import ConfigError
from jddp.trainer.reports import sinks
from jddp.trainer.reports.files import MetricsFile
from jddp.trainer.reports.lines import Course, Display
from jddp.trainer.reports.sinks import GuardedSink, Sink, Start, chart_of, choose_sinks

START = Start(None, {"seed": 3}, 0)
RECORDS = [{"step": step, "split": "train", "loss": 1 / step} for step in range(1, 11)]


class Kept:
    """Keeps its records, and does something else with each."""

    def __init__(self, start=None, act=lambda record: None):
        self.start, self.act, self.records, self.is_closed = start, act, [], False

    def log(self, record):
        self.act(record)
        self.records.append(record)

    def close(self):
        self.is_closed = True


def passed(make):
    """Passes all records on to a sink."""
    guarded = GuardedSink("mine", make)
    guarded.begin(START)
    for record in RECORDS:
        guarded.log(record)
    guarded.close()


def test_the_metrics_file_and_the_printer_of_progress_are_sinks(tmp_path):
    assert isinstance(MetricsFile(tmp_path / "metrics.jsonl"), Sink)
    assert isinstance(Display(Course(10), is_writer=True), Sink)


def test_a_sink_is_made_for_its_run_and_gets_copies_of_all_records_in_order(caplog):
    made = []
    passed(lambda start: made.append(Kept(start, dict.clear)) or made[0])
    assert made[0].start == START
    assert made[0].is_closed
    assert made[0].records == [{}] * 10  # which it has emptied
    assert RECORDS[0]["step"] == 1
    passed(lambda start: made.append(Kept()) or made[1])
    assert made[1].records == RECORDS
    assert not caplog.records


@pytest.mark.parametrize("failure", [ValueError("no\nthird"), SystemExit(3)], ids=repr)
def test_a_sink_that_fails_is_reported_once_and_gets_the_later_records(caplog, failure):
    def fail(record):
        if record["step"] in (3, 5):
            raise failure

    sink = Kept(act=fail)
    passed(lambda start: sink)
    assert [record["step"] for record in sink.records] == [1, 2, 4, 6, 7, 8, 9, 10]
    reason = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    assert caplog.messages == [
        f"sink mine cannot take the record of step 3: {reason}. The training continues.",
        "sink mine: 2 of 10 records lost",
    ]


def test_a_sink_that_cannot_be_made_or_closed_is_reported_in_a_line(caplog):
    def refuse(*_):
        raise ConnectionError("no network")

    passed(refuse)
    sink = Kept()
    sink.close = refuse
    passed(lambda start: sink)
    reason = "ConnectionError: no network. The training continues."
    assert caplog.messages == [
        f"sink mine cannot begin: {reason}",
        "sink mine: 10 of 10 records lost",
        f"sink mine cannot close: {reason}",
    ]


def test_a_sink_that_blocks_for_ever_holds_nothing_up(caplog, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(sinks, "SECONDS_TO_CLOSE", 0.01)
    passed(lambda start: Kept(act=lambda _: never.wait()))
    monkeypatch.setattr(sinks, "MOST_WAITING", 4)
    passed(lambda start: never.wait())
    never.set()
    assert caplog.messages == [
        "sink mine has not closed within 0.01 s. The training continues.",
        "sink mine: 10 of 10 records lost",
        "sink mine takes no record, and 4 wait. The training continues.",
        "sink mine: 10 of 10 records lost",
    ]


def test_a_slow_sink_gets_every_record_before_it_closes(caplog):
    all_are_given = threading.Event()
    sink = Kept(act=lambda _: all_are_given.wait())
    guarded = GuardedSink("mine", lambda start: sink)
    guarded.begin(START)
    for record in RECORDS:
        guarded.log(record)
    assert not sink.records
    all_are_given.set()
    guarded.close()
    assert sink.records == RECORDS
    assert not caplog.records


def test_a_sink_of_a_run_that_does_not_begin_is_not_made():
    made = []
    GuardedSink("mine", made.append).close()
    assert not made


def test_sinks_are_words_targets_objects_and_what_makes_one(monkeypatch):
    module = type(logging)("my_sinks")
    module.Lines, module.lines = Kept, Kept()
    monkeypatch.setitem(sys.modules, "my_sinks", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    own = Kept()
    given = ["tensorboard", "my_sinks:Lines", "my_sinks:lines", own, Kept, lambda start: own]
    chosen = choose_sinks(given, key="sinks")
    names = [sink.name for sink in chosen]
    assert names == ["tensorboard", "my_sinks:Lines", "my_sinks:lines", "Kept", "Kept", "<lambda>"]
    made = [sink.make(START) for sink in chosen[1:]]
    assert [getattr(sink, "start", None) for sink in made] == [START, None, None, START, None]
    assert made[2] is made[4] is own


WRONG = [
    ("tensorboard", r"sinks is a list of sinks, such as \['tensorboard'\]; got 'tensorboard'"),
    (["tensorbord"], r"sinks\[0\]: no sink 'tensorbord'. Did you mean 'tensorboard'\? Known: "),
    (["no_module:Sink"], r"sinks\[0\]: cannot import 'no_module'"),
    (["os:sep"], r"sinks\[0\]: os:sep has no method 'log'. A sink has log\(record\) and close\(\)"),
    ([Kept(), dict], r"sinks\[1\]: dict has no method 'log'"),
    ([3], r"sinks\[0\]: int has no method 'log'"),
]


@pytest.mark.parametrize("given, message", WRONG, ids=[message for _, message in WRONG])
def test_what_is_no_sink_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        choose_sinks(given, key="sinks")


def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for word, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        message = rf"{word} needs {package}, .*: pip install 'jddp\[{word}\]'"
        with pytest.raises(ConfigError, match=message):
            choose_sinks([word], key="report.sinks")


def test_charts_have_training_beside_evaluation_and_groups_for_the_rest():
    assert [chart_of("loss", split) for split in ("train", "eval")] == ["loss/train", "loss/eval"]
    assert chart_of("step_seconds", "train") == "time/step_seconds"
    assert chart_of("my_metric", "eval") == "my_metric/eval"
