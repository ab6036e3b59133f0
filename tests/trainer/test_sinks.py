"""Runs whose records go to sinks: to TensorBoard, to a stand-in for wandb, to sinks of a user."""

import json
import shutil
import struct
import sys
import types

import numpy as np
import optax
import pytest
from states import assert_same
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.ground.errors import ConfigError

TESTS = [make_batch(8, seed=9)]


@pytest.fixture(scope="module")
def ddp():
    return jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2)


def fit(ddp, num_steps=4, **options):
    batches = [make_batch(8, seed=seed) for seed in range(num_steps)]
    plan = {"log_every_steps": 1, "evaluate": TESTS, "eval_every_steps": 2}
    return jddp.fit(ddp, batches, num_steps=num_steps, **plan | options)


class Kept:
    def __init__(self, start):
        self.start, self.records, self.is_closed = start, [], False

    def log(self, record):
        self.records.append(record)

    def close(self):
        self.is_closed = True


class Broken:
    def log(self, record):
        raise OSError("no network")

    def close(self):
        raise OSError("no network")


def refuse(start):
    raise ValueError("no credentials")


def test_a_run_goes_its_way_with_sinks_that_fail_and_one_gets_all_its_records(ddp, caplog):
    want, kept = fit(ddp), Kept(None)
    run = fit(ddp, sinks=[Broken(), kept, refuse])
    assert_same(run.state, want.state)
    assert kept.records == run.history
    assert kept.is_closed
    assert len(run.history) == 6
    assert sorted(x for x in caplog.messages if x.startswith("sink")) == [
        "sink Broken cannot take the record of step 1: OSError: no network. The training "
        "continues.",
        "sink Broken: 6 of 6 records lost",
        "sink refuse cannot begin: ValueError: no credentials. The training continues.",
        "sink refuse: 6 of 6 records lost",
    ]


def test_a_sink_is_closed_also_where_training_fails_and_has_the_records_so_far(ddp):
    class Ends(jddp.Callback):
        def on_eval(self, run, metrics):
            raise RuntimeError("on purpose")

    kept = Kept(None)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(ddp, sinks=[kept], callbacks=[Ends()])
    assert kept.is_closed
    assert [(x["step"], x["split"]) for x in kept.records] == [
        (1, "train"),
        (2, "train"),
        (2, "eval"),
    ]


def test_other_processes_than_the_first_have_no_sinks(ddp, monkeypatch):
    monkeypatch.setattr("jddp.trainer.reporter.jax.process_index", lambda: 1)
    made = []
    fit(ddp, sinks=[made.append])
    assert not made


def test_wrong_sinks_are_refused_before_a_batch_is_read(ddp, tmp_path):
    for sinks, message in ((["tensorbord"], "Did you mean"), (["tensorboard"], "needs run_dir=")):
        with pytest.raises(ConfigError, match=message):
            jddp.fit(ddp, iter(()), num_steps=1, sinks=sinks)


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
    return [
        (x.step, value.tag, value.simple_value)
        for x in found
        for value in x.summary.value
        if value.HasField("simple_value")
    ]


def expected(history, name):
    return {(x["step"], f"{name}/{x['split']}", np.float32(x[name])) for x in history}


def test_tensorboard_shows_training_beside_evaluation_rates_and_the_config(ddp, tmp_path):
    config = {"model": {"width": 16}, "note": None}
    run = fit(ddp, run_dir=tmp_path, config=config, sinks=["tensorboard"])
    found = [*events(tmp_path)]
    values = scalars(found)
    for name in ("loss", "accuracy"):
        assert expected(run.history, name) <= set(values)
    assert {"time/step_seconds", "speed/examples_per_second"} < {tag for _, tag, _ in values}
    (text,) = [x for event in found for x in event.summary.value if x.tensor.string_val]
    assert text.tensor.string_val[0] == b"    model:\n      width: 16\n    note: null"


def test_tensorboard_hides_the_steps_that_a_resumed_run_takes_again(ddp, tmp_path):
    plan = {"run_dir": tmp_path, "sinks": ["tensorboard"]}

    class Ends(jddp.Callback):
        def on_step(self, run, metrics):
            if metrics["step"] == 4:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(ddp, 6, save_every_steps=2, callbacks=[Ends()], **plan)
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been killed
    run = fit(ddp, 6, **plan)
    shown = []
    for event in events(tmp_path):
        if event.HasField("session_log"):  # as TensorBoard does
            shown = [x for x in shown if x.step < event.step]
        shown.append(event)
    losses = [x for x in scalars(shown) if x[1].startswith("loss/")]
    assert sorted(losses) == sorted(expected(run.history, "loss"))
    assert len([x for x in events(tmp_path) if x.HasField("session_log")]) == 1
    assert len(scalars(events(tmp_path))) > len(scalars(shown))


def test_arrays_are_a_histogram_and_a_table_in_tensorboard(tmp_path):
    from jddp.trainer.reports.sinks import TensorBoard

    sink = TensorBoard(tmp_path, {}, 0)
    recall, confusion = [0.5, float("nan"), 1.0], [[3, 1], [0, 4]]
    sink.log({"step": 2, "split": "eval", "recall": recall, "confusion": confusion})
    sink.close()
    values = [value for x in events(tmp_path) for value in x.summary.value]
    histograms = {x.tag: x.histo for x in values if x.HasField("histo")}
    assert histograms.keys() == {"recall/eval"}
    assert (histograms["recall/eval"].num, histograms["recall/eval"].sum) == (2, 1.5)
    texts = {
        x.tag.partition("/text")[0]: x.tensor.string_val[0] for x in values if x.HasField("tensor")
    }
    assert texts["confusion/eval"].split() == b"[[3. 1.] [0. 4.]]".split()
    assert texts["recall/eval"].split() == b"[0.5 nan 1. ]".split()


def test_an_array_without_a_finite_number_costs_no_other_value_in_tensorboard(tmp_path):
    from jddp.trainer.reports.sinks import TensorBoard

    sink = TensorBoard(tmp_path, {}, 0)
    arrays = {"nan": np.full(3, np.nan), "empty": np.zeros((0, 2)), "good": np.arange(3.0)}
    sink.log({"step": 2, "split": "callback", **arrays, "huge": np.array([-3e38, 3e38])})
    sink.close()
    values = {value.tag: value for x in events(tmp_path) for value in x.summary.value}
    assert {tag for tag, x in values.items() if x.HasField("histo")} == {"good"}
    for name in ("nan", "empty", "huge"):
        assert b"no histogram" in values[f"{name}/text_summary"].tensor.string_val[0]


class Sampling(jddp.Callback):
    """Logs a value of each kind at evaluations."""

    def on_eval(self, run, metrics):
        weights = run.state.params["Dense_0"]["kernel"]
        pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
        run.log({"sample": "a <b>\nc", "weights": weights, "image": pixels, "score": np.float32(2)})
        pixels[:] = 0  # of no effect on what was logged


def test_text_images_and_histograms_of_a_callback_go_to_tensorboard(ddp, tmp_path):
    options = {"run_dir": tmp_path, "sinks": ["tensorboard"], "callbacks": [Sampling()]}
    run = fit(ddp, num_steps=2, **options)
    values = {x.tag: x for event in events(tmp_path) for x in event.summary.value}
    assert values["sample/text_summary"].tensor.string_val[0] == b"    a <b>\n    c"
    assert values["weights"].histo.num == run.state.params["Dense_0"]["kernel"].size
    assert (values["image"].image.height, values["image"].image.width) == (2, 2)
    assert values["score"].simple_value == 2
    plain = {"step": 2, "split": "callback", "sample": "a <b>\nc", "score": 2.0}
    assert plain in run.history  # whose other values are those of metrics.jsonl
    assert plain in [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_without_sinks_or_that_has_ended_takes_what_a_callback_logs(ddp):
    run = fit(ddp, num_steps=2, callbacks=[Sampling()])
    assert [x["score"] for x in run.history if x["split"] == "callback"] == [2.0]


class Wandb(types.ModuleType):
    """Stands in for the package wandb, which CI does not install."""

    Histogram, Table, Image = staticmethod(np.size), staticmethod(dict), staticmethod(np.shape)

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.mode, self.is_logged_in = [], "online", True

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def login(self, **options):
        assert options == {"prompt": False, "verify": False}
        return self.is_logged_in

    def Settings(self, **settings):
        return settings

    def init(self, **options):
        run = types.SimpleNamespace(options=options, logged=[], metrics=[], is_finished=False)
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


def test_wandb_gets_every_record_and_a_resumed_run_has_the_same_id(ddp, tmp_path, wandb):
    plan = {"run_dir": tmp_path / "mine", "config": {"seed": 3}, "sinks": ["wandb"]}
    run = fit(ddp, 2, **plan)
    run = fit(ddp, 4, **plan)
    first, second = wandb.runs
    assert first.options == second.options
    assert first.options["id"] == (tmp_path / "mine" / "wandb" / "id").read_text()
    assert first.options["resume"] == "allow"
    assert first.options["config"] == {"seed": 3}
    assert first.options["name"] == "mine"
    assert first.is_finished
    logged = [*first.logged, *second.logged]
    assert [x["step"] for x in logged] == [x["step"] for x in run.history]
    assert [x.get("loss/eval", x.get("loss/train")) for x in logged] == [
        x["loss"] for x in run.history
    ]
    assert first.metrics == [(("*",), {"step_metric": "step"})]


def test_wandb_gets_text_images_and_histograms_of_a_callback(ddp, tmp_path, wandb):
    run = fit(ddp, 2, run_dir=tmp_path, sinks=["wandb"], callbacks=[Sampling()])
    size = run.state.params["Dense_0"]["kernel"].size
    logged = {"step": 2, "sample": "a <b>\nc", "weights": size, "image": [(2, 2, 3)], "score": 2.0}
    assert logged in wandb.runs[0].logged


def test_wandb_without_credentials_costs_a_line_and_offline_needs_none(
    ddp, tmp_path, wandb, caplog
):
    wandb.is_logged_in = False
    for mode in ("online", "offline"):
        wandb.mode = mode
        assert fit(ddp, run_dir=tmp_path / mode, sinks=["wandb"]).step == 4
    reported = [x for x in caplog.messages if x.startswith("sink")]
    assert reported == [
        "sink wandb cannot begin: ConfigError: no credentials. Call `wandb login`, or set "
        "WANDB_MODE=offline. The training continues.",
        "sink wandb: 6 of 6 records lost",
    ]
    assert len(wandb.runs) == 1
