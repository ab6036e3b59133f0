"""The loop: the steps of a bare loop, evaluated, logged and saved when due, and resumed exactly."""

import asyncio
import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import states
from flax import nnx
from runs import at, calling, contents, printed, records
from states import assert_same, copied
from sweeps import swept
from tiny import MLP, ConvNet, NnxConvNet, loss_fn, make_batch, make_batches, wrapped

import jddp
from jddp.checkpoint import reader
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.data import ArrayExamples, TrainBatches, eval_batches
from jddp.distributed.requests import Requests
from jddp.distributed.signals import stop_signals
from jddp.ground.errors import ConfigError, DataError, FileSystemError, NumericsError, UsageError
from jddp.ground.errors import ReplicaMismatchError as Mismatch
from jddp.ground.typing import RESERVED
from jddp.trainer.reports.files import MetricsFile

NUM_STEPS = 6
SCHEDULE = optax.cosine_decay_schedule(0.1, NUM_STEPS)


@pytest.fixture(scope="module")
def ddp():
    """A model with everything that a state can hold: statistics, dropout keys, an average."""
    return wrapped(ConvNet(dropout_rate=0.3), optax.adamw(SCHEDULE), ema_decay=0.5)


def batches(num_batches=NUM_STEPS, *, broken=None):
    """A list of batches, the `broken`-th of which holds NaN."""
    made = make_batches(num_batches)
    if broken is not None:
        made[broken - 1]["x"][3] = np.nan
    return made


def endless():
    return TrainBatches(ArrayExamples(make_batch(20)), global_batch_size=8, seed=0)


EVALUATION = [make_batch(5, seed=10), make_batch(3, seed=11)]


def bare_loop(ddp, source, num_steps, *, seed=0):
    """What `fit` is held against: the state, and the metrics of each step."""
    source, metrics = iter(source), []
    state = ddp.init(seed, make_batch(8))
    for _ in range(num_steps):
        state, values = ddp.step(state, next(source))
        metrics.append({name: float(x) for name, x in values.items()})
    return state, metrics


def test_a_run_that_ends_without_a_save_resumes_from_memory_bitwise(ddp, tmp_path, capsys):
    def leave(run):
        raise KeyboardInterrupt  # As a kill, it saves nothing.

    options = {"num_steps": 8, "keep": jddp.Keep(memory_every_steps=2)}
    with pytest.raises(KeyboardInterrupt):
        jddp.fit(ddp, endless(), run_dir=tmp_path / "a", callbacks=[at(5, leave)], **options)
    assert not [*(tmp_path / "a/checkpoints").iterdir()]
    got, want = (jddp.fit(ddp, endless(), run_dir=tmp_path / x, **options) for x in "ab")
    assert "resumed from step 4 of 8" in capsys.readouterr().out
    assert_same(got.state, want.state)
    assert "two states of" in (tmp_path / "a/logs/process_0.log").read_text()
    assert not (tmp_path / "a/memory").exists()


def test_a_run_that_resumes_makes_no_first_state(ddp, tmp_path):
    made = []

    def first(batch):
        made.append(batch)
        return ddp.init(0, batch)

    for num_steps in (2, 4):
        run = jddp.fit(ddp, endless(), num_steps=num_steps, run_dir=tmp_path, state=first)
        assert run.step == num_steps
    assert len(made) == 1


def test_continuous_saves_begin_when_the_last_one_has_ended(ddp, tmp_path):
    saved = []

    def save(run):
        saved.append(run.step)
        if len(saved) == 4:
            run.stop("enough")

    options = {"num_steps": 10**6, "save_every_steps": "continuous", "keep": 9}
    run = jddp.fit(ddp, endless(), run_dir=tmp_path, callbacks=[calling(on_save=save)], **options)
    assert saved[:4] == sorted({*saved})
    assert run.checkpoints == [f"checkpoints/{step}" for step in saved[:4]]
    with pytest.raises(ConfigError, match="save_every_steps is a whole number; got 'often'"):
        jddp.fit(ddp, endless(), num_steps=1, save_every_steps="often")


def newest(path, like):
    with contextlib.closing(CheckpointFolder(path, keep=1)) as checkpoints:
        return checkpoints.restore(like=like)[:2]


class Recorder(jddp.Callback):
    def __init__(self):
        self.calls, self.metrics, self.states = [], [], {}
        for name in ("begin", "save", "end"):
            setattr(self, f"on_{name}", lambda run, name=name: self.note(name, run.step))

    def note(self, name, number):
        self.calls.append(f"{name} {number}")

    def on_epoch(self, run, number):
        self.note("epoch", number)

    def on_exception(self, run, error):
        self.note("exception", error)
        raise ValueError("as well")

    def on_step(self, run, metrics):
        self.note("step", metrics["step"])
        self.metrics.append(metrics)

    def on_eval(self, run, metrics):
        self.note("eval", run.step)
        self.states[run.step] = copied(run.state)


class Broken(Exception):
    pass


def break_off(*_):
    raise Broken


def leave(*_):
    sys.exit(3)


IN_BOTH = [ConvNet(dropout_rate=0.3), NnxConvNet(nnx.Rngs(0), dropout_rate=0.3)]


@pytest.mark.parametrize("model", IN_BOTH, ids=type)
def test_fit_takes_bitwise_the_steps_of_a_bare_loop_on_whatever_can_become_arrays(model):
    ddp, recorder = wrapped(model), Recorder()
    state, metrics = bare_loop(ddp, batches(), NUM_STEPS, seed=3)
    tensors = (jax.tree.map(memoryview, batch) for batch in batches())  # which are no arrays
    plan = {"num_steps": NUM_STEPS, "seed": 3, "log_every_steps": 4}
    run = jddp.fit(ddp, tensors, callbacks=[recorder], **plan)
    assert_same(run.state, state)
    want = [{"step": step, **values} for step, values in enumerate(metrics, start=1)]
    assert recorder.metrics == want
    assert run.metrics.items() >= want[-1].items()


def test_a_dict_of_arrays_is_evaluated_and_predicted_as_fit_takes_it(plain):
    examples = make_batch(24, seed=10)
    run = jddp.fit(plain, batches(), num_steps=2, evaluate=examples, seed=1)
    assert run.evaluate(examples) == run.evaluate() == plain.evaluate(run.state, [examples])
    np.testing.assert_array_equal(run.predict(examples), run.predict([examples]))
    for call in (plain.evaluate, plain.predict):
        for wrong in (examples, examples["x"], lambda: [examples]):
            with pytest.raises(ConfigError, match=r"takes? batches, .*jddp.data.eval_batches"):
                call(run.state, wrong)
    with pytest.raises(ConfigError, match="takes? batches"):
        run.predict(examples["x"])


def test_evaluation_comes_at_the_end_from_batches_that_can_be_read_but_once(plain):
    run = jddp.fit(plain, batches(), num_steps=3, evaluate=iter(EVALUATION))
    want = plain.evaluate(run.state, EVALUATION) | {"examples": 8}
    assert run.evaluations == [{"step": 3, "split": "eval", **want}]


def test_the_metrics_file_holds_a_line_for_each_report(ddp, tmp_path):
    _, metrics = bare_loop(ddp, batches(), 5)
    plan = {"num_steps": 5, "eval_every_steps": 4, "log_every_steps": 2}
    plan |= {"evaluate": EVALUATION, "learning_rate": SCHEDULE}
    run = jddp.fit(ddp, batches(), run_dir=tmp_path, **plan)
    lines = MetricsFile(tmp_path / "metrics.jsonl").read()
    steps = [(line["step"], line["split"]) for line in lines]
    assert steps == [(2, "train"), (4, "train"), (4, "eval"), (5, "train"), (5, "eval")]
    for line in lines:
        if line["split"] == "train":
            assert line.items() >= metrics[line["step"] - 1].items()
            # The rate that this step used: the schedule counts the steps before it.
            assert line["learning_rate"] == pytest.approx(SCHEDULE(line["step"] - 1))
            assert 0 <= line["data_wait_seconds"] <= line["step_seconds"]
            assert line["examples_per_second"] == pytest.approx(8 / line["step_seconds"])
        else:
            assert line.keys() == {"step", "split", "loss", "accuracy", "examples"}
    assert lines[-2:] == [run.metrics, run.eval_metrics]


def test_a_state_that_has_steps_behind_it_takes_only_those_that_are_left(plain, tmp_path):
    (want, _), (state, _) = (bare_loop(plain, batches(), num) for num in (NUM_STEPS, 4))
    plan = {"num_steps": NUM_STEPS, "run_dir": tmp_path, "log_every_steps": 1}
    assert_same(jddp.fit(plain, batches()[4:], state=state, **plan).state, want)
    assert [record["step"] for record in records(tmp_path)] == [5, 6]
    assert newest(tmp_path / "checkpoints", want)[0] == NUM_STEPS
    plain.step(state, make_batch(8))
    with pytest.raises(UsageError, match="This state was given to step call"):
        jddp.fit(plain, batches(), num_steps=NUM_STEPS, state=state)


def scalar_loss(model, batch, train):
    return loss_fn(model, batch, train)[0].mean()


def test_padding_is_refused_for_a_loss_that_is_a_scalar():
    ddp, rows = wrapped(mesh=4, loss=scalar_loss), make_batch(20)
    with pytest.raises(UsageError, match="'loss' is a scalar, .* a multiple of 4, and drop_rem"):
        jddp.fit(ddp, rows, global_batch_size=6, num_epochs=1)
    assert jddp.fit(ddp, rows, global_batch_size=4, num_epochs=1).step == 5


def fit(ddp, source, run_dir, **options):
    plan = {"log_every_steps": 1, "eval_every_steps": 3, "save_every_steps": 2}
    plan |= {"num_steps": NUM_STEPS, "evaluate": EVALUATION, "run_dir": run_dir}
    return jddp.fit(ddp, source, **plan | options)


def test_a_finished_run_trains_nothing_and_appends_nothing(plain, tmp_path, capsys):
    plan = {"eval_every_steps": None, "save_every_steps": 2}
    want, before = fit(plain, batches(), tmp_path, **plan), contents(tmp_path)
    recorder = Recorder()
    for num_steps in (6, 2):
        more = {"callbacks": [recorder], "num_steps": num_steps}
        run = fit(plain, batches(), tmp_path, **plan, **more)
        assert contents(tmp_path) == before
        assert recorder.calls == []
        assert_same(run.state, want.state)
        assert (run.step, run.metrics, run.history) == (6, want.metrics, want.history)
    jddp.fit(plain, batches(), num_steps=2, state=run.state)
    assert printed(capsys).count("finished at step 6; nothing to do") == 3


def test_a_run_directory_with_a_run_or_without_or_of_another_model_is_refused(ddp, plain, tmp_path):
    with pytest.raises(ConfigError, match=r"resume='must'.* holds no checkpoint"):
        fit(plain, batches(), tmp_path, resume="must")
    fit(plain, batches(), tmp_path, resume="never", num_steps=2)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a run at step 2, and resume='never'"):
        fit(plain, batches(), tmp_path, resume="never")
    with pytest.raises(ConfigError, match=r"\n  params/BatchNorm_0/bias: absent there"):
        fit(ddp, batches(), tmp_path)
    assert contents(tmp_path) == before
    assert fit(plain, batches(), tmp_path, resume="must").step == NUM_STEPS


def test_the_length_of_epochs_that_are_made_longer_is_kept_and_reported(tmp_path, plain, capsys):
    for num_epochs in (1, 2):
        rows = {"batches": make_batch(20), "global_batch_size": 16, "num_epochs": num_epochs}
        run = jddp.fit(plain, **rows, run_dir=tmp_path, log_every_steps=1)
    assert "num_steps 2 -> 4" in printed(capsys)
    assert [record["count"] for record in run.history] == [16, 4] * 2
    kept = json.loads((tmp_path / f"checkpoints/{run.step}/run.json").read_text())
    assert kept["plan"]["num_steps"] == run.step == 4


def test_what_has_changed_since_a_run_of_objects_was_broken_off_is_said(tmp_path, capsys):
    fit(wrapped(), batches(), tmp_path, num_steps=3)
    assert "changed" not in printed(capsys)
    fit(wrapped(batch_norm="local"), batches(), tmp_path, log_every_steps=2)
    changed = "num_steps 3 -> 6, log_every_steps 1 -> 2, batch_norm sync -> local"
    assert f"changed: {changed}: finished steps stay" in printed(capsys)


def bent(state):
    """The state, one parameter of which is one bit off on replica 1."""
    kernel = states.bent(state.params["Dense_0"]["kernel"], device=1, place=3, mask=1)
    layer = state.params["Dense_0"] | {"kernel": kernel}
    return state.replace(params=state.params | {"Dense_0": layer})


def test_a_replica_that_drifts_off_by_one_bit_is_named_and_not_saved(plain, tmp_path):
    def fit_bent(step, folder, **options):
        callbacks = [at(step, lambda run: setattr(run, "state", bent(run.state)))]
        options = {"eval_every_steps": None, "callbacks": callbacks, **options}
        fit(plain, endless(), tmp_path / folder, **options)

    message = r"^After step 20 .*params/Dense_0/.*differs on replica 1 \(process 0\)"
    often, never = (jddp.Checks(replicas_every_steps=every) for every in (10, None))
    with pytest.raises(Mismatch, match=message) as caught:
        fit_bent(13, "checked", num_steps=40, checks=often, save_every_steps=None)
    assert caught.value.exit_code == 76
    with pytest.raises(Mismatch, match="Step 4 is not saved: params/Dense_0/"):
        fit_bent(3, "saved", checks=never)
    first = plain.init(0, make_batch(8))
    assert newest(tmp_path / "saved" / "checkpoints", first)[0] == 2
    with pytest.raises(Mismatch, match="After step 0 params/Dense_0/kernel differs on"):
        jddp.fit(plain, batches(), num_steps=2, state=bent(first))


def test_a_replayed_step_that_differs_is_not_taken_and_names_the_device(plain, tmp_path):
    options = {"checks": jddp.Checks(replicas_every_steps=None, replay_every_steps=2)}
    want, got = fit(plain, endless(), None), fit(plain, endless(), None, **options)
    assert_same(got.state, want.state)
    options["callbacks"] = [at(3, lambda run: setattr(run, "state", bent(run.state)))]
    message = r"^Step 4, .*device 0 .* or device 1 .* is params/Dense_0/kernel\."
    with pytest.raises(Mismatch, match=message) as caught:
        fit(plain, endless(), tmp_path, save_every_steps=None, **options)
    assert caught.value.exit_code == 76
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_signal_interrupts_a_run_and_the_same_call_resumes_it(plain, tmp_path, capsys):
    def train(run_dir, *callbacks):
        rarely = {"eval_every_steps": 80, "save_every_steps": 60}
        return fit(plain, endless(), run_dir, num_steps=200, callbacks=callbacks, **rarely)

    number = signal.SIGHUP
    want, handlers = train(tmp_path / "whole"), list(map(signal.getsignal, stop_signals()))
    recorder = Recorder()
    run = train(tmp_path / "run", at(20, lambda run: signal.raise_signal(number)), recorder)
    assert run.interrupted == number.name
    assert 20 <= run.step < 200
    assert recorder.calls[-1] == f"save {run.step}"
    assert list(map(signal.getsignal, stop_signals())) == handlers
    assert f"{number.name}: saved step {run.step} of 200" in capsys.readouterr().out
    step, state = newest(tmp_path / "run" / "checkpoints", run.state)
    assert step == run.step
    assert_same(state, run.state)
    run = train(tmp_path / "run")
    assert run.interrupted is None
    assert_same(run.state, want.state)
    assert records(tmp_path / "run") == records(tmp_path / "whole")


@pytest.mark.parametrize("saves", [True, False])
def test_two_signals_at_once_are_one(plain, tmp_path, saves):
    twice = [at(3, lambda run: signal.raise_signal(signal.SIGTERM))] * 2
    run_dir = tmp_path if saves else None
    run = jddp.fit(plain, endless(), num_steps=10_000, callbacks=twice, run_dir=run_dir)
    assert run.interrupted == "SIGTERM"
    assert int(run.state.step) == run.step < 10_000
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == [str(run.step)] * saves


def test_the_event_loop_of_a_notebook_keeps_its_handlers(plain):
    called = []

    async def notebook():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, called.append, "heard")
        jddp.fit(plain, batches(2), num_steps=2)
        signal.raise_signal(signal.SIGUSR1)
        while not called:
            await asyncio.sleep(0)

    asyncio.run(notebook())
    assert called == ["heard"]


@pytest.mark.parametrize("every, step", [(3, 3), (None, NUM_STEPS)], ids=["on the way", "last"])
def test_an_evaluation_that_a_signal_breaks_off_is_made_up_for(plain, tmp_path, every, step):
    class Interrupting(list):
        def __iter__(self):
            yield self[0]  # which is traced before the first step
            signal.raise_signal(signal.SIGTERM)
            while True:  # until all have agreed
                yield self[0]

    plan = {"eval_every_steps": every, "save_every_steps": None}
    want = fit(plain, batches(), tmp_path / "whole", **plan)
    run = fit(plain, batches(), tmp_path / "run", evaluate=Interrupting(EVALUATION), **plan)
    assert (run.interrupted, run.step, run.evaluations) == ("SIGTERM", step, [])
    run = fit(plain, batches(), tmp_path / "run", **plan)
    assert_same(run.state, want.state)
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_a_run_that_a_signal_stops_before_its_first_step_evaluates_nothing_of_it(
    plain, tmp_path, monkeypatch
):
    asked, ask = threading.Event(), Requests.ask
    monkeypatch.setattr(Requests, "ask", lambda *given: (ask(*given), asked.set()))

    class Interrupting(list):
        def __iter__(self):  # as it is traced
            signal.raise_signal(signal.SIGTERM)
            asked.wait()
            return super().__iter__()

    run = fit(plain, batches(), tmp_path, evaluate=Interrupting(EVALUATION))
    assert (run.interrupted, run.step) == ("SIGTERM", 0)
    run = fit(plain, batches(), tmp_path)
    assert [x["step"] for x in run.evaluations] == [3, NUM_STEPS]


def test_a_run_in_another_thread_leaves_the_signals_alone(plain):
    def handlers():
        return list(map(signal.getsignal, stop_signals()))

    seen, before = [], handlers()
    look = {"num_steps": 2, "callbacks": [at(1, lambda run: seen.append(handlers()))]}
    (thread := threading.Thread(target=jddp.fit, args=(plain, batches()), kwargs=look)).start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("log_every_steps", [1, 50])
def test_a_loss_that_is_not_finite_ends_the_run_is_logged_and_spares_the_checkpoint_before_it(
    plain, tmp_path, log_every_steps
):
    plan = {"save_every_steps": 1, "log_every_steps": log_every_steps}
    with pytest.raises(NumericsError, match="The loss is nan at step 4") as caught:
        fit(plain, batches(broken=4), tmp_path, **plan)
    assert caught.value.exit_code == 80
    want, _ = bare_loop(plain, batches(), 3)
    step, state = newest(tmp_path / "checkpoints", want)
    assert step == 3
    assert_same(state, want)
    assert None not in [record["loss"] for record in records(tmp_path)]
    log = (tmp_path / "logs" / "process_0.log").read_text()
    assert log.count("INFO step ") == (3 if log_every_steps == 1 else 0)
    assert "NumericsError: The loss is nan at step 4" in log.partition("ERROR ended by:")[2]
    jddp.fit(plain, batches(), num_steps=1, run_dir=tmp_path / "other")
    assert (tmp_path / "logs" / "process_0.log").read_text() == log
    mended = fit(plain, batches(), tmp_path, **plan)
    assert_same(mended.state, bare_loop(plain, batches(), NUM_STEPS)[0])


REFUSED = [
    ({"log_every_steps": 0}, "log_every_steps"),
    ({"eval_every_steps": 0}, "eval_every_steps"),
    ({"save_every_steps": -1}, "save_every_steps"),
    ({"resume": "sometimes"}, "resume 'sometimes'"),
    ({"run_dir": None, "evaluate": jddp.Evaluation(EVALUATION, "ema")}, "eval_params='ema'"),
    ({"run_dir": None, "resume": "must"}, "resume='must'"),
    ({"evaluate": lambda: EVALUATION}, "evaluate= takes batches, .*not function"),
    ({"evaluate": iter(EVALUATION), "eval_every_steps": 1}, "evaluate= is an iterator"),
    ({"run_dir": None, "callbacks": [jddp.KeepBest()]}, "KeepBest .* run_dir="),
    ({"callbacks": [jddp.EarlyStopping("acuracy", mode="max")]}, "'acuracy'.* accuracy, loss. Did"),
    ({"callbacks": [jddp.KeepBest("count", mode="max")]}, "KeepBest .*'count'"),
    ({"callbacks": [jddp.KeepBest()], "evaluate": None}, "no evaluate="),
    ({"callbacks": [jddp.EarlyStopping()], "eval_every_steps": None}, "eval_every_steps="),
]
PARTS = [
    (jddp.Evaluation, {"batches": EVALUATION, "params": "average"}, "eval_params 'average'"),
    (jddp.Evaluation, {"batches": EVALUATION, "limit": 0}, "limit"),
    (jddp.Keep, {"every_steps": 0}, "keep_every_steps"),
    (jddp.Checks, {"max_consecutive_skips": 2.5}, "max_consecutive_skips is a whole number"),
    (jddp.Checks, {"on_spike": "stop"}, "on_spike 'stop' is unknown"),
    (jddp.EarlyStopping, {"metric": "score"}, "'score' does not show"),
    (jddp.EarlyStopping, {"metric": "accuracy", "mode": "most"}, "mode 'most'"),
    (jddp.EarlyStopping, {"patience": 0}, "patience"),
    (jddp.EarlyStopping, {"min_delta": -1.0}, "min_delta"),
    (jddp.KeepBest, {"keep": 0}, "keep"),
]


def test_options_that_cannot_be_are_refused_before_a_step_is_taken(plain, tmp_path):
    recorder = Recorder()
    for options, message in REFUSED:
        given = {"run_dir": tmp_path / "run", "callbacks": [], **options}
        given["callbacks"] = [*given["callbacks"], recorder]
        with pytest.raises(ConfigError, match=message):
            fit(plain, batches(), **given)
    assert recorder.metrics == []
    for part, given, message in PARTS:
        with pytest.raises(ConfigError, match=message):
            part(**given)


def test_a_mistake_in_evaluation_shows_before_the_first_step(tmp_path):
    def timed(model, batch, train):
        losses, metrics = loss_fn(model, batch, train)
        return losses, metrics if train else {**metrics, "step_seconds": losses}

    recorder = Recorder()
    for loss, evaluation, error, message in (
        (timed, EVALUATION, ConfigError, "'step_seconds' is jddp's own"),
        (loss_fn, [{"x": np.zeros((2, 16), np.float32)}], ConfigError, "'y'"),
        (scalar_loss, [make_batch(5)], UsageError, "'loss' is a scalar.* 5 rows do not fill 6"),
        (loss_fn, [], UsageError, "no batches"),
    ):
        with pytest.raises(error, match=message):
            fit(wrapped(loss=loss), batches(), tmp_path, evaluate=evaluation, callbacks=[recorder])
    assert recorder.metrics == []


def test_a_callback_that_changes_what_it_gets_changes_no_record(plain, tmp_path):
    changes = calling(
        on_step=lambda run, metrics: (metrics.clear(), run.metrics.clear()),
        on_eval=lambda run, metrics: metrics.clear(),
    )
    run = fit(plain, batches(), tmp_path, callbacks=[changes])
    lines = records(tmp_path)
    assert [x["loss"] > 0 for x in lines] == [True] * len(lines)
    assert run.eval_metrics["loss"] == lines[-1]["loss"]


WITHOUT_LABELS = {"x": np.zeros((2, 16), np.float32)}
# Options and batches of a run that ends early, or in the very end.
BROKEN_OFF = {
    "first": (batches(), {"callbacks": [at(1, break_off)], "save_every_steps": 2}),
    "data": (batches(4), {}),  # which end early
    "evaluation": (batches(), {"evaluate": [*EVALUATION, WITHOUT_LABELS]}),
    "on_end": (batches(), {"callbacks": [calling(on_end=break_off)]}),
    "exit": (batches(), {"callbacks": [at(4, leave)]}),
    "exit in on_eval": (batches(), {"callbacks": [calling(on_eval=leave)], "eval_every_steps": 4}),
    "twice": (batches(), {"callbacks": [at(4, break_off), at(5, break_off)]}),
    "exit after an error": (batches(), {"callbacks": [at(4, break_off), at(5, leave)]}),
}


@pytest.mark.parametrize("source, options", swept(BROKEN_OFF, every=3))
def test_what_a_run_has_learnt_is_saved_whatever_raises(ddp, tmp_path, source, options):
    options = {"eval_every_steps": None, "save_every_steps": None, **options}
    recorder = Recorder()
    options["callbacks"] = [*options.get("callbacks", []), recorder]
    with pytest.raises((Broken, DataError, ConfigError, SystemExit)) as caught:
        fit(ddp, source, tmp_path / "broken", **options)
    failed = caught.value.run
    # Callbacks, also those behind one that raises, records and the checkpoint end alike.
    assert [metrics["step"] for metrics in recorder.metrics] == [*range(1, failed.step + 1)]
    assert [*recorder.states] == [record["step"] for record in failed.evaluations]
    trained = [x["step"] for x in failed.history if x["split"] == "train"]
    assert trained == [*range(1, failed.step + 1)]
    step, state = newest(tmp_path / "broken" / "checkpoints", failed.state)
    assert step == failed.step
    assert_same(state, failed.state)
    plan = {"eval_every_steps": options["eval_every_steps"], "save_every_steps": None}
    run = fit(ddp, batches(), tmp_path / "broken", callbacks=[recorder], **plan)
    want = fit(ddp, batches(), tmp_path / "whole", **plan)
    assert [metrics["step"] for metrics in recorder.metrics] == [*range(1, NUM_STEPS + 1)]
    assert_same(run.state, want.state)
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    assert run.evaluations == want.evaluations


def test_a_batch_of_another_form_compiles_again(plain):
    batches = [make_batch(8), make_batch(4), {**make_batch(8), "z": np.zeros(8)}]
    assert jddp.fit(plain, batches, num_steps=3).step == 3


@pytest.mark.parametrize("every", [2, 50])
def test_a_stopped_run_is_evaluated_and_saved_and_then_finished(plain, tmp_path, capsys, every):
    plan = {"eval_every_steps": None, "save_every_steps": every}
    run = fit(plain, batches(), tmp_path, callbacks=[at(2, lambda run: run.stop("enough"))], **plan)
    # The step after the one that was reported was under way, unless a save had drained the loop.
    assert run.step == (3 if every == 50 else 2)
    assert run.stopped == "enough"
    assert run.eval_metrics["step"] == run.step
    before = contents(tmp_path)
    again = fit(plain, batches(), tmp_path, **plan)
    assert contents(tmp_path) == before
    assert (again.step, again.eval_metrics) == (run.step, run.eval_metrics)
    assert f"stopped (enough) at step {run.step}; nothing to do" in printed(capsys)


RISING = [0.30, 0.32, 0.45, 0.42, 0.44]
# Values of evaluations; the step that is stopped at, the best step, and its value.
JUDGED = [
    ("accuracy", [0.1, 0.3, 0.2, 0.4, 0.4, 0.1], (6, 4, 0.4)),
    ("accuracy", RISING, (5, 3, 0.45)),
    *(("loss", [x, 2.0, x, 1.0, x, 1.5], (6, 4, 1.0)) for x in (np.nan, None)),  # None is of JSON
]


@pytest.mark.parametrize("metric, values, want", JUDGED)
def test_early_stopping_and_the_best_follow_the_direction_of_a_metric(plain, metric, values, want):
    stopping, best = jddp.EarlyStopping(metric, patience=2), jddp.KeepBest(metric)
    run = jddp.Run(plain, plain.init(0, make_batch(8)))
    run.save = lambda where: None
    for step, value in enumerate(values, start=1):
        evaluations = [*run.evaluations, {"step": step, metric: value}]
        run.progress = dataclasses.replace(run.progress, step=step, evaluations=evaluations)
        for callback in (stopping, best):
            callback.on_eval(run, run.eval_metrics)
        assert (run.stopped is None) == (step < want[0])
    assert run.stopped == f"{metric} has not improved for 2 evaluations"
    assert (best.step, best.best) == want[1:]
    run.evaluations.append({"step": 9, metric: [0.5, 1.0]})
    with pytest.raises(ConfigError, match="is an array"):
        stopping.on_eval(run, run.eval_metrics)


def test_every_field_of_a_record_but_the_metrics_has_a_reserved_name(tmp_path):
    options = {"max_grad_norm": 1.0, "precision": jddp.Precision(loss_scale="dynamic")}
    run = fit(wrapped(**options), batches(), tmp_path, learning_rate=lambda step: 0.1)
    fields = {name for record in run.history for name in record}
    # Names of epochs, GPUs, tokens and spikes are reserved too.
    elsewhere = {"epoch", "tokens_per_second", "mfu", "spike"}
    elsewhere |= {"peak_memory_bytes", "predicted_memory_bytes", "memory_limit_bytes"}
    assert fields - {"accuracy"} == {*RESERVED} - elsewhere


def test_an_evaluation_that_is_not_finite_is_reported_and_costs_nothing(plain, tmp_path, capsys):
    odd = batches(1, broken=1)
    run = fit(plain, batches(), tmp_path, evaluate=odd, callbacks=[jddp.KeepBest()])
    said = printed(capsys)
    assert "eval 3 loss nan" in said
    assert "best loss: none" in said
    evaluated = [x["loss"] for x in records(tmp_path) if x["split"] == "eval"]
    assert (run.step, evaluated) == (NUM_STEPS, [None, None])


def best_of(run):
    """The steps of the best checkpoints that are kept."""
    return [int(name.removeprefix("best/")) for name in run.checkpoints if "best" in name]


@pytest.fixture(scope="module")
def forth_and_back():
    """Takes two steps towards the training batch, then goes away from it."""
    return wrapped(MLP(), optax.sgd(lambda step: jnp.where(step < 2, 0.3, -0.6)))


SAME = [make_batch(8)] * NUM_STEPS
EACH = {"evaluate": SAME[:1], "eval_every_steps": 1}


def test_a_folder_of_one_checkpoint_holds_that_of_the_life_that_saved_last(plain, tmp_path):
    """The first life saves at step 5, and is resumed from step 2, as after a kill."""
    for step, resumes_from in ((5, 2), (3, NUM_STEPS)):
        save = at(step, lambda run: run.save("mine"))
        state = fit(plain, batches(), tmp_path, callbacks=[save], eval_every_steps=1).state
        for path in (tmp_path / "checkpoints").iterdir():
            if int(path.name) > resumes_from:
                shutil.rmtree(path)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["3"]
    assert newest(tmp_path / "mine", state)[0] == 3


def test_a_state_that_is_restored_and_evaluated_is_not_written_again(plain, tmp_path):
    fit(plain, batches(), tmp_path, evaluate=None)
    before = (tmp_path / "checkpoints" / str(NUM_STEPS)).stat().st_ino
    assert fit(plain, batches(), tmp_path).eval_metrics["step"] == NUM_STEPS
    assert (tmp_path / "checkpoints" / str(NUM_STEPS)).stat().st_ino == before


def test_callbacks_remember_the_evaluations_before_a_resume_and_the_best_checkpoints_stay(
    forth_and_back, tmp_path, capsys
):
    options = {"callbacks": [jddp.KeepBest(keep=3), at(4, break_off)], "save_every_steps": 1}
    with pytest.raises(Broken):
        fit(forth_and_back, SAME, tmp_path, **options, **EACH)
    best = jddp.KeepBest(keep=3)
    run = fit(forth_and_back, SAME, tmp_path, callbacks=[best, jddp.EarlyStopping()], **EACH)
    assert (run.step, run.stopped) == (5, "loss has not improved for 3 evaluations")
    ranked = sorted(run.evaluations, key=lambda record: record["loss"])
    first, *others = (record["step"] for record in ranked[:3])
    assert (best.step, best.best) == (first, ranked[0]["loss"])
    assert f"best loss {best.best:.4g} at step {first}, in {tmp_path}/best/" in printed(capsys)
    kept = sorted([first, *others])
    assert best_of(run) == kept
    for step, line in zip(kept, [*reader.checkpoint_lines(tmp_path / "best")], strict=True):
        assert line.split()[0] == str(step)
        assert f"loss {run.evaluations[step - 1]['loss']:.4g}" in line
    for step in (first, others[0]):
        assert jddp.open_run(tmp_path, model=MLP(), loss_fn=loss_fn, checkpoint="best").step == step
        next((tmp_path / "best" / str(step)).rglob("arrays.json")).write_text("{}")


def test_a_run_whose_directory_is_moved_ends_in_good_order_and_resumes_there(plain, tmp_path):
    def move(run):  # behind the save of the second step
        while any(run.run_dir.glob("checkpoints/*.new")):
            time.sleep(0.01)
        (tmp_path / "run").rename(tmp_path / "moved")

    options = {"callbacks": [at(3, move)], "save_every_steps": 2}
    with pytest.raises(FileSystemError, match=f"step {NUM_STEPS} cannot be saved.*No such file"):
        fit(plain, batches(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    run = fit(plain, batches(), tmp_path / "moved", save_every_steps=2)
    trained = [x["step"] for x in records(tmp_path / "moved") if x["split"] == "train"]
    assert trained == [*range(1, run.step + 1)] == [*range(1, NUM_STEPS + 1)]


def test_a_limited_evaluation_is_exact_over_its_first_batches_or_over_rows_of_all(plain):
    tests = make_batch(80) | {"y": np.repeat([0, 1], 40).astype(np.int32)}  # class after class
    examples = eval_batches(tests, global_batch_size=4)
    rows = [*examples.limited(2, seed=3)]
    assert [batch["y"].tolist() for batch in rows] == [[0] * 4, [1] * 4]
    for given, limit, read in ((EVALUATION, 1, EVALUATION[:1]), (examples, 2, rows)):
        plan = {"evaluate": jddp.Evaluation(given, limit=limit), "eval_every_steps": 1, "seed": 3}
        run = jddp.fit(plain, batches(), num_steps=2, **plan)
        found = plain.evaluate(run.state, read)
        assert found == {name: run.eval_metrics[name] for name in found}
        assert {record["examples"] for record in run.evaluations} == {found["examples"]}
        assert run.evaluate()["examples"] == (8 if given is EVALUATION else 80)


class Scores(list):
    """Evaluation batches whose score follows a list, and stays at its last."""

    def __iter__(self):
        score = self.pop(0) if len(self) > 1 else self[0]
        yield {**make_batch(8), "score": np.full(8, score, np.float32)}


def scored(model, batch, train):
    losses, _ = loss_fn(model, batch, train)
    return losses if train else (losses, {"score": batch["score"]})


@pytest.mark.parametrize(
    "keep, mode, kept",
    [(1, "max", [4]), (2, "max", [4, 7]), (3, "max", [4, 6, 7]), (1, "min", [5])],
)
def test_a_best_checkpoint_that_is_asked_for_later_is_one_that_can_be_kept(
    tmp_path, capsys, keep, mode, kept
):
    ddp = wrapped(loss=scored)

    def train(num_steps, scores, callbacks):
        evaluate = Scores([scores[0], *scores])  # the first one also before the first step
        options = {"evaluate": evaluate, "eval_every_steps": 1, "run_dir": tmp_path}
        return jddp.fit(ddp, batches(8), num_steps=num_steps, callbacks=callbacks, **options)

    train(4, [1, 3, 2, 2], [])  # the best state, of step 2, is not kept
    train(4, [1], [jddp.KeepBest("score", mode=mode, keep=keep)])  # has nothing to do
    assert "/best/" not in printed(capsys)
    assert best_of(train(7, [0, 1, 2], [jddp.KeepBest("score", mode=mode, keep=keep)])) == kept
    value = {4: 2, 5: 0}[kept[0]]
    assert f"best score {value} at step {kept[0]}, in {tmp_path}/best/{kept[0]}" in printed(capsys)
    assert best_of(train(8, [0.5], [jddp.KeepBest("score", mode=mode, keep=keep)])) == kept


def test_callbacks_hear_of_the_beginning_the_end_of_an_epoch_and_a_failure(plain, tmp_path, caplog):
    """Of twenty examples, eight a step, epochs end inside of steps 3 and 8, and with step 5."""
    first, second = Recorder(), Recorder()
    options = {"run_dir": tmp_path, "num_steps": 8, "log_every_steps": 50}
    with pytest.raises(Broken):
        jddp.fit(plain, endless(), callbacks=[first, at(4, break_off)], **options)
    assert ", ".join(first.calls[:5]) == "begin 0, step 1, step 2, step 3, epoch 1"
    assert first.calls[-1] == f"exception {Broken()}"
    assert "A callback has failed in on_exception" in caplog.text
    failed_at = len(first.metrics)
    plan = {"evaluate": EVALUATION, "eval_every_steps": 7, "save_every_steps": 6}
    run = jddp.fit(plain, endless(), callbacks=[second], **options, **plan)
    assert second.calls[0] == f"begin {failed_at}"
    steps = [call for call in first.calls + second.calls if call.startswith(("step", "epoch"))]
    want = "step 1, step 2, step 3, epoch 1, step 4, step 5, epoch 2, step 6, step 7, step 8"
    assert ", ".join(steps) == f"{want}, epoch 3"
    ends = "step 6, save 6, step 7, eval 7, step 8, epoch 3, save 8, eval 8, end 8"
    assert ", ".join(second.calls).endswith(ends)
    assert str(tmp_path) in repr(run)
