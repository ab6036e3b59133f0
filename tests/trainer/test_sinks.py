"""Runs whose records go to sinks: to TensorBoard, to a stand-in for wandb, to sinks of a user."""

import importlib.util
import json
import shutil
import struct
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from runs import at, calling
from states import assert_same
from tiny import make_batch, make_batches

import jddp
from jddp.ground.errors import ConfigError
from jddp.trainer.reports import sinks
from jddp.trainer.reports.sinks import GuardedSink, Start, choose_sinks
from jddp.workbench.sinks import TensorBoard, WeightsAndBiases


def fit(plain, num_steps=4, **options):
    plan = {"log_every_steps": 1, "evaluate": [make_batch(8, seed=9)], "eval_every_steps": 2}
    return jddp.fit(plain, make_batches(num_steps), num_steps=num_steps, **plan | options)


class Kept:
    """Keeps its records, and does something else with each."""

    def __init__(self, start=None, act=lambda record: None):
        self.start, self.act, self.records, self.is_closed = start, act, [], False

    def log(self, record):
        self.act(record)
        self.records.append(record)

    def close(self):
        self.is_closed = True


def test_a_run_goes_its_way_with_sinks_that_fail_or_change_records_and_one_gets_all(plain, caplog):
    def refuse(start):
        raise ValueError("no credentials")

    want, kept, emptied = fit(plain), Kept(), Kept(act=dict.clear)
    broken = SimpleNamespace(log=refuse, close=lambda: refuse(None))
    run = fit(plain, sinks=[broken, emptied, kept, refuse])
    assert_same(run.state, want.state)
    assert kept.records == run.history
    assert (kept.is_closed, len(run.history), emptied.records) == (True, 6, [{}] * 6)
    lost = [x for x in caplog.messages if x.endswith("6 of 6 records lost")]
    assert sorted(lost) == [f"sink {x}: 6 of 6 records lost" for x in ("SimpleNamespace", "refuse")]


def test_a_sink_is_closed_also_where_training_fails_and_has_the_records_so_far(plain):
    kept = Kept()
    with pytest.raises(ZeroDivisionError):
        fit(plain, sinks=[kept], callbacks=[calling(on_eval=lambda run, metrics: 1 / 0)])
    assert kept.is_closed
    assert [x["split"] for x in kept.records] == ["train", "train", "eval"]


def test_other_processes_than_the_first_have_no_sinks(plain, monkeypatch):
    monkeypatch.setattr("jddp.trainer.reporter.jax.process_index", lambda: 1)
    made = []
    fit(plain, sinks=[made.append])
    assert not made


def test_a_sink_that_needs_a_folder_is_refused_without_one(plain):
    with pytest.raises(ConfigError, match="run_dir="):
        jddp.fit(plain, iter(()), num_steps=1, sinks=["tensorboard"])


def events(run_dir):
    """The events of all event files, in the order of their starts."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(run_dir.glob("events.*"), key=lambda path: int(path.suffix[1:])):
        rest = path.read_bytes()
        while rest:  # size, checksum, event, checksum
            (size,) = struct.unpack("<Q", rest[:8])
            yield Event.FromString(rest[12 : 12 + size])
            rest = rest[16 + size :]


def scalars(found):
    values = [(x.step, value) for x in found for value in x.summary.value]
    return [(i, x.tag, x.simple_value) for i, x in values if x.HasField("simple_value")]


def expected(history, name):
    return {(x["step"], f"{name}/{x['split']}", np.float32(x[name])) for x in history}


def test_tensorboard_shows_training_beside_evaluation_rates_and_the_config(plain, tmp_path):
    config = {"model": {"width": 16}, "note": None}
    board = [lambda start: TensorBoard(start._replace(config=config))]
    run = fit(plain, run_dir=tmp_path, sinks=board)
    found = [*events(tmp_path)]
    values = scalars(found)
    for name in ("loss", "accuracy"):
        assert expected(run.history, name) <= set(values)
    assert {"time/step_seconds", "speed/examples_per_second"} < {tag for _, tag, _ in values}
    (text,) = [x for event in found for x in event.summary.value if x.tensor.string_val]
    assert text.tensor.string_val[0] == b"    model:\n      width: 16\n    note: null"


def test_tensorboard_hides_the_steps_that_a_resumed_run_takes_again(plain, tmp_path):
    plan = {"run_dir": tmp_path, "sinks": ["tensorboard"]}
    with pytest.raises(ZeroDivisionError):
        fit(plain, 6, save_every_steps=2, callbacks=[at(4, lambda run: 1 / 0)], **plan)
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been killed
    run = fit(plain, 6, **plan)
    shown = []
    for event in events(tmp_path):
        if event.HasField("session_log"):  # as TensorBoard does
            shown = [x for x in shown if x.step < event.step]
        shown.append(event)
    losses = [x for x in scalars(shown) if x[1].startswith("loss/")]
    assert sorted(losses) == sorted(expected(run.history, "loss"))
    assert len([x for x in events(tmp_path) if x.HasField("session_log")]) == 1
    assert len(scalars(events(tmp_path))) > len(scalars(shown))


def test_metrics_that_are_arrays_are_tables_and_other_arrays_histograms_of_finite_numbers(tmp_path):
    sink = TensorBoard(Start(tmp_path, {}, 0))
    recall, confusion = [0.5, float("nan"), 1.0], [[3, 1], [0, 4]]
    sink.log({"step": 2, "split": "eval", "recall": recall, "confusion": confusion})
    arrays = {"nan": np.full(3, np.nan), "empty": np.zeros((0, 2)), "good": np.arange(3.0)}
    sink.log({"step": 2, "split": "callback", **arrays})
    sink.close()
    values = {value.tag: value for x in events(tmp_path) for value in x.summary.value}
    histograms = {
        tag: (x.histo.num, x.histo.sum) for tag, x in values.items() if x.HasField("histo")
    }
    assert histograms == {"good": (3, 3)}
    texts = {tag: x.tensor.string_val[0] for tag, x in values.items() if x.HasField("tensor")}
    assert texts["confusion/eval/text_summary"].split() == b"[[3. 1.] [0. 4.]]".split()
    assert texts["recall/eval/text_summary"].split() == b"[0.5 nan 1. ]".split()


def sample(run, metrics):
    """Logs a value of each kind at evaluations."""
    weights = run.state.params["Dense_0"]["kernel"]
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    run.log({"sample": "a <b>\nc", "weights": weights, "image": pixels, "score": np.float32(2)})
    pixels[:] = 0  # of no effect on what was logged


SAMPLING = {"callbacks": [calling(on_eval=sample)]}


def test_text_images_and_histograms_of_a_callback_go_to_tensorboard(plain, tmp_path):
    run = fit(plain, num_steps=2, run_dir=tmp_path, sinks=["tensorboard"], **SAMPLING)
    values = {x.tag: x for event in events(tmp_path) for x in event.summary.value}
    assert values["sample/text_summary"].tensor.string_val[0] == b"    a <b>\n    c"
    assert values["weights"].histo.num == run.state.params["Dense_0"]["kernel"].size
    assert (values["image"].image.height, values["image"].image.width) == (2, 2)
    assert values["score"].simple_value == 2
    plain = {"step": 2, "split": "callback", "sample": "a <b>\nc", "score": 2.0}
    assert plain in run.history  # whose other values are those of metrics.jsonl
    assert plain in [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]


class Wandb(ModuleType):
    """Stands in for the package wandb, which CI does not install."""

    Histogram, Table, Image = staticmethod(np.size), staticmethod(dict), staticmethod(np.shape)

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.mode, self.is_logged_in = [], "online", True

    def setup(self):
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, **options):
        assert options == {"prompt": False, "verify": False}
        return self.is_logged_in

    def Settings(self, **settings):
        return settings

    def init(self, **options):
        run = SimpleNamespace(options=options, logged=[], metrics=[], is_finished=False)
        run.log = run.logged.append
        run.define_metric = lambda *names, **options: run.metrics.append((names, options))
        run.finish = lambda: setattr(run, "is_finished", True)
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    return module


def test_wandb_gets_every_record_and_a_resumed_run_has_the_same_id(plain, tmp_path, wandb):
    board = [lambda start: WeightsAndBiases(start._replace(config={"seed": 3}))]
    plan = {"run_dir": tmp_path / "mine", "sinks": board}
    fit(plain, 2, **plan)
    run = fit(plain, 4, **SAMPLING, **plan)
    first, second = wandb.runs
    assert first.options == second.options
    id_of_run = (tmp_path / "mine" / "wandb" / "id").read_text()
    want = {"id": id_of_run, "resume": "allow", "config": {"seed": 3}, "name": "mine"}
    assert first.options | want == first.options
    assert first.is_finished
    logged = [*first.logged, *second.logged]
    assert [x["step"] for x in logged] == [x["step"] for x in run.history]
    losses = [x.get("loss/eval", x.get("loss/train")) for x in logged if "score" not in x]
    assert losses == [x["loss"] for x in run.history if "loss" in x]
    assert first.metrics == [(("*",), {"step_metric": "step"})]
    size = run.state.params["Dense_0"]["kernel"].size
    values = {"sample": "a <b>\nc", "weights": size, "image": [(2, 2, 3)], "score": 2.0}
    assert {"step": 4, **values} in second.logged


def test_wandb_without_credentials_costs_a_line_and_offline_none(plain, tmp_path, wandb, caplog):
    wandb.is_logged_in = False
    for mode in ("online", "offline"):
        wandb.mode = mode
        assert fit(plain, run_dir=tmp_path / mode, sinks=["wandb"]).step == 4
    assert "sink wandb cannot begin: ConfigError: no credentials." in caplog.text
    assert len(wandb.runs) == 1


START = Start(None, {"seed": 3}, 0)


def passed(make):
    guarded = GuardedSink("mine", make)
    guarded.begin(START)
    for step in range(1, 11):
        guarded.log({"step": step, "split": "train", "loss": 1 / step})
    guarded.close()


@pytest.mark.parametrize("failure", [ValueError("no\nthird"), SystemExit(3)], ids=repr)
def test_a_sink_that_fails_is_reported_once_and_gets_the_later_records(caplog, failure):
    def fail(record):
        if record["step"] in (3, 5):
            raise failure

    sink = Kept(act=fail)
    passed(lambda start: sink)
    assert [record["step"] for record in sink.records] == [1, 2, 4, 6, 7, 8, 9, 10]
    reason = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    first, last = caplog.messages
    assert f"the record of step 3: {reason}" in first
    assert last == "sink mine: 2 of 10 records lost"


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


def test_sinks_are_words_targets_objects_and_what_makes_one(monkeypatch):
    module = ModuleType("my_sinks")
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
    ("tensorboard", "is a list of sinks"),
    (["tensorbord"], r"sinks\[0\]: no sink 'tensorbord'. Did you mean 'tensorboard'"),
    (["no_module:Sink"], r"sinks\[0\]: cannot import 'no_module'"),
    (["os:sep"], r"sinks\[0\]: os:sep has no method 'log'"),
    ([Kept(), dict], r"sinks\[1\]: dict has no method 'log'"),
    ([3], r"sinks\[0\]: int has no method 'log'"),
    (["tensorboard"], r"tensorboard needs tensorboardX, .*: pip install 'jddp\[tensorboard\]'"),
    (["wandb"], r"wandb needs wandb, .*: pip install 'jddp\[wandb\]'"),
]


@pytest.mark.parametrize("given, message", WRONG, ids=[message for _, message in WRONG])
def test_what_is_no_sink_is_refused_and_a_missing_package_is_named(monkeypatch, given, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        choose_sinks(given, key="sinks")
