"""The loop: the steps of a bare loop, evaluated, logged and saved when due, and resumed exactly."""

import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import contents, records
from states import assert_same, copied
from tiny import MLP, ConvNet, NnxConvNet, loss_fn, make_batch

import jddp
from jddp.checkpoint.checkpoints import Checkpoints
from jddp.data import ArrayExamples, TrainBatches
from jddp.distributed.signals import stop_signals
from jddp.errors import (
    ConfigError,
    DataError,
    FileSystemError,
    NumericsError,
    ReplicaMismatchError,
    UsageError,
)
from jddp.trainer.reports.metrics_file import MetricsFile
from jddp.trainer.resume_notes import differences

NUM_STEPS = 6
SCHEDULE = optax.cosine_decay_schedule(0.1, NUM_STEPS)


def wrapped(model=None, optimizer=None, *, mesh=2, loss=loss_fn, **options):
    model = MLP() if model is None else model
    return jddp.DataParallel(model, optimizer or optax.sgd(0.1), loss, mesh=mesh, **options)


@pytest.fixture(scope="module")
def ddp():
    """A model with everything that a state can hold: statistics, dropout keys, an average."""
    return wrapped(ConvNet(dropout_rate=0.3), optax.adamw(SCHEDULE), ema_decay=0.5)


@pytest.fixture(scope="module")
def plain():
    """The smallest model."""
    return wrapped()


def batches(num_batches=NUM_STEPS, *, broken=None):
    """A list of batches, as a user may have it; the `broken`-th holds NaN."""
    made = [make_batch(8, seed=seed) for seed in range(num_batches)]
    if broken is not None:
        made[broken - 1]["x"][3] = np.nan
    return made


def endless():
    """Batches that know their position."""
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


def printed(capsys):
    """What was printed since this was last asked, without the ends of lines."""
    return " ".join(capsys.readouterr().out.split())


def newest(path, like):
    """The newest checkpoint in a directory, and its step."""
    checkpoints = Checkpoints(path, keep=1)
    step, state, _ = checkpoints.restore(like=like)
    checkpoints.close()
    return step, state


class Recorder(jddp.Callback):
    """Writes down every call."""

    def __init__(self):
        self.calls, self.metrics, self.states = [], [], {}

    def on_step(self, run, metrics):
        self.calls.append(("step", metrics["step"]))
        self.metrics.append(metrics)

    def on_eval(self, run, metrics):
        self.calls.append(("eval", run.step))
        self.states[run.step] = copied(run.state)

    def on_save(self, run):
        self.calls.append(("save", run.step))

    def on_end(self, run):
        self.calls.append(("end", run.step))


class At(jddp.Callback):
    """Does something once the metrics of a step are known."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step(self, run, metrics):
        if metrics["step"] == self.step:
            self.action(run)


class Broken(Exception):
    """What ends a run that is to be resumed."""


def break_off(run):
    raise Broken


# --- steps, evaluation and records ---------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [ConvNet(dropout_rate=0.3), NnxConvNet(nnx.Rngs(0), dropout_rate=0.3)], ids=type
)
def test_fit_takes_bitwise_the_steps_of_a_bare_loop(model):
    ddp, recorder = wrapped(model), Recorder()
    state, metrics = bare_loop(ddp, batches(), NUM_STEPS, seed=3)
    run = ddp.fit(batches(), num_steps=NUM_STEPS, seed=3, callbacks=[recorder], log_every_steps=4)
    assert_same(run.state, state)
    want = [{"step": step, **values} for step, values in enumerate(metrics, start=1)]
    assert recorder.metrics == want
    assert run.step == NUM_STEPS
    assert run.metrics.items() >= want[-1].items()


def test_one_pass_generators_are_read_without_a_gap(plain):
    state, _ = bare_loop(plain, batches(), NUM_STEPS)
    assert_same(plain.fit(iter(batches()), num_steps=NUM_STEPS).state, state)


@pytest.mark.parametrize(
    "num_steps, every, evaluated", [(6, 2, [2, 4, 6]), (5, 2, [2, 4, 5]), (3, None, [3])]
)
def test_evaluation_comes_every_n_steps_and_at_the_end_once_per_step(
    plain, num_steps, every, evaluated
):
    recorder = Recorder()
    run = plain.fit(
        batches(),
        num_steps=num_steps,
        evaluate=EVALUATION,
        eval_every_steps=every,
        callbacks=[recorder],
    )
    assert [step for what, step in recorder.calls if what == "eval"] == evaluated
    want = plain.evaluate(run.state, EVALUATION)
    assert run.eval_metrics == {"step": num_steps, "split": "eval", **want}
    assert want["examples"] == 8


def test_the_metrics_file_holds_a_line_for_each_report(ddp, tmp_path):
    _, metrics = bare_loop(ddp, batches(), 5)
    run = ddp.fit(
        batches(),
        num_steps=5,
        evaluate=EVALUATION,
        run_dir=tmp_path,
        eval_every_steps=4,
        log_every_steps=2,
        learning_rate=SCHEDULE,
    )
    lines = MetricsFile(tmp_path / "metrics.jsonl").read()
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"),
        (4, "train"),
        (4, "eval"),
        (5, "train"),
        (5, "eval"),
    ]
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


def test_the_average_of_parameters_is_evaluated_where_asked_for(ddp):
    run = ddp.fit(batches(), num_steps=3, evaluate=EVALUATION, eval_params="ema")
    assert run.eval_metrics["loss"] == ddp.evaluate(run.state, EVALUATION, "ema")["loss"]
    assert run.eval_metrics["loss"] != ddp.evaluate(run.state, EVALUATION)["loss"]


def test_a_state_that_has_steps_behind_it_takes_only_those_that_are_left(plain, tmp_path):
    want, _ = bare_loop(plain, batches(), NUM_STEPS)
    state, _ = bare_loop(plain, batches(), 4)
    run = plain.fit(
        batches()[4:], num_steps=NUM_STEPS, state=state, run_dir=tmp_path, log_every_steps=1
    )
    assert_same(run.state, want)
    assert [record["step"] for record in records(tmp_path)] == [5, 6]
    assert newest(tmp_path / "checkpoints", want)[0] == NUM_STEPS


def scalar_loss(model, batch, train):
    return loss_fn(model, batch, train)[0].mean()


def test_padding_is_refused_for_a_loss_that_is_a_scalar():
    ddp, examples = wrapped(mesh=4, loss=scalar_loss), ArrayExamples(make_batch(20))
    plan = {"seed": 0, "num_epochs": 1, "multiple_of": 4}
    padded = TrainBatches(examples, global_batch_size=6, **plan)
    with pytest.raises(UsageError, match="'loss' is a scalar, .* a multiple of 4, drop_remainder"):
        ddp.fit(padded, num_steps=4)
    full = TrainBatches(examples, global_batch_size=4, **plan)
    assert ddp.fit(full, num_steps=5).step == 5


# --- resuming ------------------------------------------------------------------------------------


def fit(ddp, source, run_dir, **options):
    plan = {"log_every_steps": 1, "eval_every_steps": 3, "save_every_steps": 2} | options
    evaluation = options.pop("evaluate", EVALUATION)
    plan |= {"num_steps": NUM_STEPS, "evaluate": evaluation, "run_dir": run_dir} | options
    return ddp.fit(source, **plan)


@pytest.fixture(scope="module", params=[batches, endless])
def whole(ddp, request, tmp_path_factory):
    """A run that nothing disturbed, and what makes its batches."""
    run_dir = tmp_path_factory.mktemp("whole")
    return fit(ddp, request.param(), run_dir), request.param


@pytest.mark.parametrize("step", [1, 4])  # before any save; behind a save and an evaluation
def test_a_run_that_was_broken_off_ends_as_if_it_had_not_been(ddp, whole, tmp_path, step):
    want, source = whole
    with pytest.raises(Broken):
        fit(ddp, source(), tmp_path, callbacks=[At(step, break_off)])
    run = fit(ddp, source(), tmp_path)
    assert_same(run.state, want.state)
    assert records(tmp_path) == records(want.run_dir)
    assert run.eval_metrics == want.eval_metrics


def test_a_finished_run_trains_nothing_and_appends_nothing(plain, tmp_path):
    plan = {"eval_every_steps": None, "save_every_steps": 2}
    want, before = fit(plain, batches(), tmp_path, **plan), contents(tmp_path)
    recorder = Recorder()
    run = fit(plain, batches(), tmp_path, callbacks=[recorder], **plan)
    assert contents(tmp_path) == before
    assert recorder.calls == []
    assert_same(run.state, want.state)
    assert (run.step, run.metrics, run.eval_metrics) == (6, want.metrics, want.eval_metrics)


def test_resume_says_whether_there_must_be_a_run_already(plain, tmp_path):
    with pytest.raises(ConfigError, match=r"resume='must'.* holds no checkpoint"):
        fit(plain, batches(), tmp_path, resume="must")
    fit(plain, batches(), tmp_path, resume="never", num_steps=2)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a run at step 2, and resume='never'"):
        fit(plain, batches(), tmp_path, resume="never")
    assert contents(tmp_path) == before
    assert fit(plain, batches(), tmp_path, resume="must").step == NUM_STEPS


def test_the_run_directory_of_another_model_is_refused_with_nothing_changed(ddp, plain, tmp_path):
    fit(plain, batches(), tmp_path, num_steps=2)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"\n    BatchNorm_0\n      bias: absent there"):
        fit(ddp, batches(), tmp_path)
    assert contents(tmp_path) == before


def test_two_hundred_steps_that_stop_anywhere_are_two_hundred_steps(tmp_path):
    ddp = wrapped(NnxConvNet(nnx.Rngs(0), dropout_rate=0.3), optax.adamw(0.01), ema_decay=0.9)
    plan = {"num_steps": 200, "log_every_steps": 7, "eval_every_steps": 90, "save_every_steps": 30}
    want = fit(ddp, endless(), tmp_path / "whole", **plan)
    rng = np.random.default_rng()
    stops = sorted(rng.integers(1, 200, 2).tolist())
    for stop in stops:
        with pytest.raises(Broken):
            fit(ddp, endless(), tmp_path / "broken", callbacks=[At(stop, break_off)], **plan)
    run = fit(ddp, endless(), tmp_path / "broken", **plan)
    assert_same(run.state, want.state)
    assert records(tmp_path / "broken") == records(tmp_path / "whole"), f"stopped at {stops}"


WORLDS = {
    "micro-batches": (MLP(), [(2, 1), (2, 2), (1, 4)]),
    "devices under batch norm": (ConvNet(), [(4, 1), (1, 1), (2, 1)]),
}


@pytest.mark.parametrize("model, worlds", WORLDS.values(), ids=WORLDS)
def test_a_run_moves_from_world_to_world_up_to_rounding(tmp_path, capsys, model, worlds):
    def train(world, run_dir, num_steps):
        num_devices, accumulate_steps = world
        options = {"mesh": num_devices, "accumulate_steps": accumulate_steps}
        ddp = wrapped(model, optax.sgd(0.05, 0.9), **options)
        return fit(ddp, endless(), run_dir, num_steps=num_steps)

    want = train(worlds[0], tmp_path / "whole", 9)
    for num_steps, world in zip((3, 6, 9), worlds, strict=True):
        capsys.readouterr()
        run = train(world, tmp_path / "moved", num_steps)
        said = printed(capsys)
        told = "all counts continue exactly; all else is equal within rounding" in said
        assert told == (num_steps > 3)
    jax.tree.map(
        # Nine steps' sums, each in another order.
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        jax.device_get((run.state.params, run.state.model_state, run.state.opt_state)),
        jax.device_get((want.state.params, want.state.model_state, want.state.opt_state)),
    )
    assert [r["count"] for r in records(tmp_path / "moved") if r["split"] == "train"] == [8] * 9


RANDOM = "random numbers differ (keys depend on replica and micro-batch)"
STATISTICS = "batch norm sees other parts of a batch"


@pytest.mark.parametrize(
    "now, facts, note",
    [
        ({}, "", None),
        ({"num_devices": 2}, "statistics", "all else is equal within rounding"),
        ({"num_devices": 2}, "random", RANDOM),
        ({"num_devices": 2, "batch_norm": "local"}, "statistics", STATISTICS),
        ({"accumulate_steps": 2}, "random", RANDOM),
        ({"accumulate_steps": 2}, "statistics", STATISTICS),
        ({"num_devices": 2, "local_steps": 3}, "", "each replica begins with the mean of the"),
    ],
    ids=str,
)
def test_a_note_names_what_is_not_the_same_in_another_world(now, facts, note):
    before = {"num_processes": 1, "num_devices": 4, "accumulate_steps": 1, "batch_norm": "sync"}
    before |= {"batch_norm_group_size": None, "logical_replicas": None, "local_steps": None}
    before |= {name: x for name, x in now.items() if name in ("batch_norm", "local_steps")}
    flags = {"uses_rng": facts == "random", "has_statistics": facts == "statistics"}
    said = differences(before, before | now, **flags)
    assert (said is None) == (note is None)
    assert note is None or f"all counts continue exactly; {note}" in said


@pytest.mark.parametrize(
    "model, worlds",
    [
        (ConvNet(dropout_rate=0.5), [(2, 1), (2, 2)]),
        (NnxConvNet(nnx.Rngs(0), dropout_rate=0.3), [(2, 1), (1, 2)]),
    ],
    ids=["linen", "nnx"],
)
def test_what_is_not_the_same_in_another_world_is_said_once(tmp_path, capsys, model, worlds):
    for num_steps, (num_devices, parts) in zip((2, 4), worlds, strict=True):
        ddp = wrapped(model, mesh=num_devices, accumulate_steps=parts)
        capsys.readouterr()
        fit(ddp, endless(), tmp_path, num_steps=num_steps)
        assert printed(capsys).count(f"{RANDOM}; {STATISTICS}") == (num_steps == 4)
    fit(ddp, endless(), tmp_path)
    assert RANDOM not in printed(capsys)


def test_an_option_that_changes_numbers_is_named_when_a_run_of_objects_resumes(tmp_path, capsys):
    for num_steps, options in ((2, {}), (4, {"batch_norm": "local"})):
        fit(wrapped(**options), endless(), tmp_path, num_steps=num_steps)
    said = printed(capsys)
    assert "batch_norm local (was sync): the order" in said
    assert "exactly; another batch_norm changes what later steps compute" in said
    assert "bitwise identical" not in said


# --- replicas ------------------------------------------------------------------------------------


def bent(state, replica=1):
    """The state, one parameter of which is one bit off on one replica."""

    def bend(x):
        copies = [np.array(shard.data) for shard in x.addressable_shards]
        copies[replica].view(np.uint32).reshape(-1)[3] ^= 1
        arrays = [
            jax.device_put(copy, shard.device)
            for copy, shard in zip(copies, x.addressable_shards, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)

    layer = {**state.params["Dense_0"], "kernel": bend(state.params["Dense_0"]["kernel"])}
    return state.replace(params={**state.params, "Dense_0": layer})


def bend(run):
    run.state = bent(run.state)


RARELY = {"eval_every_steps": None, "check_replicas_every_steps": None}


def test_a_replica_that_drifts_off_by_one_bit_is_found_and_named(plain, tmp_path):
    plan = {**RARELY, "check_replicas_every_steps": 10, "save_every_steps": None, "num_steps": 40}
    with pytest.raises(ReplicaMismatchError) as caught:
        fit(plain, endless(), tmp_path, callbacks=[At(13, bend)], **plan)
    assert caught.value.exit_code == 76
    told = str(caught.value)
    assert told.startswith("After step 20 ")
    assert "params/Dense_0/" in told
    assert "differs on replica 1 (process 0)" in told


def test_no_checkpoint_is_made_of_replicas_that_differ(plain, tmp_path):
    with pytest.raises(ReplicaMismatchError, match="Step 4 is not saved: params/Dense_0/"):
        fit(plain, batches(), tmp_path, callbacks=[At(3, bend)], **RARELY)
    step, _ = newest(tmp_path / "checkpoints", plain.init(0, make_batch(8)))
    assert step == 2


def test_a_first_state_whose_replicas_differ_is_refused(plain):
    state = bent(plain.init(0, make_batch(8)))
    with pytest.raises(ReplicaMismatchError, match="After step 0 params/Dense_0/kernel differs on"):
        plain.fit(batches(), num_steps=2, state=state)


# --- signals -------------------------------------------------------------------------------------


def test_a_signal_interrupts_a_run_and_the_same_call_resumes_it(plain, tmp_path, capsys):
    def train(run_dir, *callbacks):
        return fit(plain, endless(), run_dir, num_steps=200, callbacks=callbacks, **rarely)

    number, rarely = signal.SIGHUP, {"eval_every_steps": 80, "save_every_steps": 60}
    want, handlers = train(tmp_path / "whole"), list(map(signal.getsignal, stop_signals()))
    recorder = Recorder()
    run = train(tmp_path / "run", At(20, lambda run: signal.raise_signal(number)), recorder)
    assert run.interrupted == number.name
    assert 20 <= run.step < 200
    assert recorder.calls[-1] == ("save", run.step)
    assert list(map(signal.getsignal, stop_signals())) == handlers
    captured = capsys.readouterr()
    assert f"{number.name}: saved step {run.step} of 200" in captured.out
    step, state = newest(tmp_path / "run" / "checkpoints", run.state)
    assert step == run.step
    assert_same(state, run.state)
    run = train(tmp_path / "run")
    assert run.interrupted is None
    assert_same(run.state, want.state)
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_two_signals_at_once_are_one(plain, tmp_path):
    def signal_twice(run):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    callbacks = [At(3, signal_twice)]
    run = plain.fit(batches(50), num_steps=50, run_dir=tmp_path, callbacks=callbacks)
    assert run.interrupted == "SIGTERM"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(run.step)]


def test_a_hangup_that_is_ignored_stays_so(plain):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has it
    try:
        callbacks = [At(3, lambda run: signal.raise_signal(signal.SIGHUP))]
        run = plain.fit(batches(50), num_steps=50, callbacks=callbacks)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.interrupted is None
    assert run.step == 50


def test_a_run_without_a_directory_just_stops_at_a_signal(plain):
    run = plain.fit(
        endless(),
        num_steps=10_000,
        callbacks=[At(3, lambda run: signal.raise_signal(signal.SIGINT))],
    )
    assert run.interrupted == "SIGINT"
    assert int(run.state.step) == run.step < 10_000


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
    assert run.eval_metrics == want.eval_metrics
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_a_run_in_another_thread_leaves_the_signals_alone(plain):
    handlers = list(map(signal.getsignal, stop_signals()))
    seen = []
    look = At(1, lambda run: seen.append(list(map(signal.getsignal, stop_signals()))))
    thread = threading.Thread(target=lambda: plain.fit(batches(), num_steps=2, callbacks=[look]))
    thread.start()
    thread.join()
    assert seen == [handlers]


def test_batches_of_what_can_become_arrays_are_trained_on_as_arrays(plain):
    class Tensor:
        """Of another library, as PyTorch's."""

        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return self.values

    tensors = [{name: Tensor(x) for name, x in batch.items()} for batch in batches()]
    run = plain.fit(tensors, num_steps=NUM_STEPS)
    assert_same(run.state, bare_loop(plain, batches(), NUM_STEPS)[0])


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("log_every_steps", [1, 50])
def test_a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoint_before_it(
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
    assert all(record["loss"] is not None for record in records(tmp_path))
    mended = fit(plain, batches(), tmp_path, **plan)
    assert_same(mended.state, bare_loop(plain, batches(), NUM_STEPS)[0])


def test_batches_that_end_early_are_a_data_error_that_says_when(plain, tmp_path):
    with pytest.raises(DataError, match=r"ended after 4\. Give an endless iterator") as caught:
        fit(plain, batches(4), tmp_path)
    assert caught.value.exit_code == 65
    with pytest.raises(DataError, match="ended after 4"):
        fit(plain, batches(4), tmp_path)
    with pytest.raises(DataError, match="ended after 0"):
        plain.fit([], num_steps=1)
    assert_same(fit(plain, batches(), tmp_path).state, bare_loop(plain, batches(), NUM_STEPS)[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_steps": 0}, "num_steps is at least 1; got 0"),
        ({"log_every_steps": 0}, "log_every_steps is at least 1"),
        ({"eval_every_steps": 0}, "eval_every_steps is at least 1"),
        ({"save_every_steps": -1}, "save_every_steps is at least 1"),
        ({"keep": 0}, "keep is at least 1"),
        ({"resume": "sometimes"}, "resume 'sometimes' is unknown"),
        ({"eval_params": "average"}, "eval_params 'average' is unknown"),
        ({"run_dir": None, "resume": "must"}, "resume='must' needs run_dir"),
    ],
)
def test_options_out_of_their_range_are_refused_before_anything_is_written(
    plain, tmp_path, options, message
):
    with pytest.raises(ConfigError, match=message):
        fit(plain, batches(), **{"run_dir": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


def test_an_average_that_is_not_kept_is_missed_before_the_first_step(plain):
    recorder = Recorder()
    with pytest.raises(ConfigError, match="eval_params='ema' needs"):
        plain.fit(batches(), num_steps=2, eval_params="ema", callbacks=[recorder])
    assert recorder.calls == []


def test_a_state_that_a_step_has_taken_is_refused(plain):
    state = plain.init(0, make_batch(8))
    plain.step(state, make_batch(8))
    with pytest.raises(UsageError, match="This state was given to step call"):
        plain.fit(batches(), num_steps=2, state=state)


def test_a_mistake_in_evaluation_shows_before_the_first_step(tmp_path):
    def only_trains(model, batch, train):
        assert train, "no evaluation"
        return loss_fn(model, batch, train)

    recorder = Recorder()
    for loss, evaluation, error, message in (
        (only_trains, EVALUATION, AssertionError, "no evaluation"),
        (loss_fn, [{"x": np.zeros((2, 16), np.float32)}], ConfigError, "'y'"),
        (scalar_loss, [make_batch(5)], UsageError, "'loss' is a scalar.* 5 rows do not fill 6"),
        (loss_fn, [], UsageError, "no batches"),
    ):
        with pytest.raises(error, match=message):
            fit(wrapped(loss=loss), batches(), tmp_path, evaluate=evaluation, callbacks=[recorder])
    assert recorder.calls == []


def test_an_evaluation_iterator_that_can_be_read_but_once_is_evaluated_whole(plain):
    run = plain.fit(batches(), num_steps=2, evaluate=iter(EVALUATION))
    assert run.eval_metrics["examples"] == 8


class FailsIn(jddp.Callback):
    """Raises in one of its hooks, at the end of the run at the latest."""

    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, *_):
        raise Broken


def broken_off_by(what):
    """Options and batches of a run that ends early, or in the very end."""
    without_labels = {"x": np.zeros((2, 16), np.float32)}
    late = {"eval_every_steps": None, "save_every_steps": None}
    return {
        "data": (batches(4), late),
        "evaluation": (batches(), {**late, "evaluate": [*EVALUATION, without_labels]}),
        "on_step": (batches(), {**late, "callbacks": [At(4, break_off)]}),
        "on_eval": (batches(), {**late, "eval_every_steps": 4, "callbacks": [FailsIn("on_eval")]}),
        "on_save": (batches(), {**late, "save_every_steps": 4, "callbacks": [FailsIn("on_save")]}),
        "on_end": (batches(), {**late, "callbacks": [FailsIn("on_end")]}),
    }[what]


@pytest.mark.parametrize("what", ["data", "evaluation", "on_step", "on_eval", "on_save", "on_end"])
def test_what_a_run_has_learnt_is_saved_whatever_raises(plain, tmp_path, capsys, what):
    source, options = broken_off_by(what)
    with pytest.raises((Broken, DataError, ConfigError)) as caught:
        fit(plain, source, tmp_path / "broken", **options)
    failed = caught.value.run
    assert failed.step >= 4
    assert [x["step"] for x in failed.history if x["split"] == "train"][:4] == [1, 2, 3, 4]
    step, state = newest(tmp_path / "broken" / "checkpoints", failed.state)
    assert step == failed.step
    assert_same(state, failed.state)
    plan = {"eval_every_steps": options["eval_every_steps"], "save_every_steps": None}
    run, want = (fit(plain, batches(), tmp_path / name, **plan) for name in ("broken", "whole"))
    assert_same(run.state, want.state)
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    assert run.evaluations == want.evaluations


def test_an_error_carries_the_run_without_a_directory_too(plain):
    with pytest.raises(Broken) as caught:
        plain.fit(batches(), num_steps=6, callbacks=[At(3, break_off)])
    run = caught.value.run
    assert run.step == 4
    assert plain.evaluate(run.state, EVALUATION) == run.evaluate(EVALUATION)


def test_the_evaluation_of_a_checkpoint_is_known_when_it_is_resumed(plain, tmp_path):
    plan = {"eval_every_steps": 2, "save_every_steps": 2, "log_every_steps": 50}
    fit(plain, batches(), tmp_path, num_steps=4, **plan)
    recorder = Recorder()
    run = fit(plain, batches(), tmp_path, callbacks=[recorder], **plan)
    assert [step for what, step in recorder.calls if what == "eval"] == [6]
    assert [record["step"] for record in run.evaluations] == [2, 4, 6]
    steps = [record["step"] for record in records(tmp_path) if record["split"] == "eval"]
    assert steps == [2, 4, 6]


X, Y = make_batch(8, seed=3).values()


@pytest.mark.parametrize(
    "batch, message",
    [
        (
            {"x": X[:, :12], "y": Y},
            r"step 4: .* has x float32 \(rows, 12\); the first .* x float32 \(rows, 16\)",
        ),
        (
            {"x": X, "label": Y},
            r"step 4: .* has y absent, label int32 \(rows\); the first .* y int32 \(rows\)",
        ),
        (
            {"x": X.astype(np.float16), "y": Y},
            r"step 4: .* has x float16 \(rows, 16\); the first .* x float32",
        ),
    ],
    ids=["features", "keys", "dtype"],
)
def test_a_batch_of_another_form_is_refused_with_its_step_and_both_forms(
    plain, tmp_path, batch, message
):
    with pytest.raises(DataError, match=message):
        fit(plain, [*batches(3), batch, *batches(2)], tmp_path)
    assert_same(fit(plain, batches(), tmp_path).state, bare_loop(plain, batches(), NUM_STEPS)[0])


def test_batches_that_differ_in_rows_alone_are_trained_on(plain):
    assert plain.fit([make_batch(8), make_batch(4), make_batch(8)], num_steps=3).step == 3


def test_a_run_of_objects_says_what_is_changed_when_it_is_made_longer(plain, tmp_path, capsys):
    fit(plain, batches(), tmp_path, num_steps=3, learning_rate=optax.constant_schedule(0.1))
    assert "changed" not in capsys.readouterr().out
    late = optax.constant_schedule(0.2)
    fit(plain, batches(), tmp_path, log_every_steps=2, learning_rate=late)
    told = printed(capsys)
    assert "changed: num_steps 3 -> 6, log_every_steps 1 -> 2; finished steps stay" in told
    assert "step 3 was taken at 0.1 and would now be at 0.2" in told


def test_fewer_steps_than_a_run_has_are_reported_and_change_nothing(plain, tmp_path, capsys):
    want = fit(plain, batches(), tmp_path)
    before = contents(tmp_path)
    run = fit(plain, batches(), tmp_path, num_steps=2)
    assert "num_steps=2: the run is at step 6 already" in printed(capsys)
    assert_same(run.state, want.state)
    assert contents(tmp_path) == before
    plain.fit(batches(), num_steps=2, state=run.state)
    assert "the run is at step 6 already" in printed(capsys)


# --- callbacks -----------------------------------------------------------------------------------


def test_callbacks_are_called_for_every_step_and_in_order(plain, tmp_path):
    recorder = Recorder()
    plan = {"num_steps": 5, "eval_every_steps": 2, "save_every_steps": 4, "log_every_steps": 50}
    run = fit(plain, batches(), tmp_path, callbacks=[recorder], **plan)
    assert recorder.calls == [
        ("step", 1),
        ("step", 2),
        ("eval", 2),
        ("step", 3),
        ("step", 4),
        ("save", 4),
        ("eval", 4),
        ("step", 5),
        ("save", 5),
        ("eval", 5),
        ("end", 5),
    ]
    assert "loss" in repr(run)
    assert str(tmp_path) in repr(run)


@pytest.mark.parametrize("every", [1, 2, 50])
def test_a_run_that_is_stopped_is_evaluated_and_saved_and_then_finished(plain, tmp_path, every):
    plan = {"eval_every_steps": None, "save_every_steps": every}
    stop = At(2, lambda run: run.stop("enough"))
    run = fit(plain, batches(), tmp_path, callbacks=[stop], **plan)
    # The step after the one that was reported was under way, unless a save had drained the loop.
    assert run.step == (3 if every == 50 else 2)
    assert run.stopped == "enough"
    assert run.eval_metrics["step"] == run.step
    before = contents(tmp_path)
    again = fit(plain, batches(), tmp_path, **plan)
    assert contents(tmp_path) == before
    assert (again.step, again.eval_metrics) == (run.step, run.eval_metrics)


@pytest.fixture
def some_run(plain):
    """A run for callbacks to look at."""
    return jddp.Run(plain, plain.init(0, make_batch(8)), run_dir=None, save=lambda where: None)


def test_early_stopping_waits_for_as_many_evaluations_as_it_has_patience(some_run):
    run, stopping = some_run, jddp.EarlyStopping("accuracy", mode="max", patience=2)
    for accuracy in (0.1, 0.3, 0.2, 0.4, 0.4):
        run.evaluations.append({"accuracy": accuracy})
        stopping.on_eval(run, run.eval_metrics)
        assert run.stopped is None
    run.evaluations.append({"accuracy": 0.1})
    stopping.on_eval(run, run.eval_metrics)
    assert run.stopped == "accuracy has not improved for 2 evaluations"


def test_early_stopping_ends_a_run_that_learns_nothing(tmp_path):
    still = wrapped(MLP(), optax.sgd(0.0))
    run = fit(still, batches(), tmp_path, eval_every_steps=1, callbacks=[jddp.EarlyStopping()])
    assert run.step == 4  # the first evaluation is the best; three did not improve on it
    assert fit(still, batches(), tmp_path, eval_every_steps=1).step == 4


def test_what_callbacks_watch_must_be_there(some_run):
    with pytest.raises(ConfigError, match="Choose 'min' or 'max'"):
        jddp.KeepBest(mode="most")
    some_run.evaluations.append({"loss": 0.0, "accuracy": 1.0})
    with pytest.raises(ConfigError, match=r"no metric 'acuracy'; it has \['accuracy', 'loss'\]"):
        jddp.EarlyStopping("acuracy").on_eval(some_run, some_run.eval_metrics)


@pytest.fixture(scope="module")
def forth_and_back():
    """Takes two steps towards the training batch, then goes away from it."""
    return wrapped(MLP(), optax.sgd(lambda step: jnp.where(step < 2, 0.3, -0.6)))


SAME = {"evaluate": [make_batch(8)], "eval_every_steps": 1}


def test_the_best_checkpoint_holds_the_state_with_the_best_evaluation(forth_and_back, tmp_path):
    recorder, keep_best = Recorder(), jddp.KeepBest()
    same = [make_batch(8)] * NUM_STEPS
    fit(forth_and_back, same, tmp_path, callbacks=[recorder, keep_best], **SAME)
    evaluations = {r["step"]: r["loss"] for r in records(tmp_path) if r["split"] == "eval"}
    assert keep_best.step == min(evaluations, key=evaluations.get) == 2
    assert keep_best.best == evaluations[2]
    step, best = newest(tmp_path / "best", recorder.states[2])
    assert step == 2
    assert_same(best, recorder.states[2])


def test_callbacks_remember_the_evaluations_before_a_resume(forth_and_back, tmp_path):
    same = [make_batch(8)] * NUM_STEPS
    callbacks = [jddp.KeepBest(), jddp.EarlyStopping(), At(4, break_off)]
    with pytest.raises(Broken):
        fit(forth_and_back, same, tmp_path, callbacks=callbacks, save_every_steps=1, **SAME)
    callbacks = [jddp.KeepBest(), jddp.EarlyStopping()]
    run = fit(forth_and_back, same, tmp_path, callbacks=callbacks, **SAME)
    assert run.stopped == "loss has not improved for 3 evaluations"
    assert run.step == 5
    assert newest(tmp_path / "best", run.state)[0] == 2


def test_keeping_the_best_needs_a_directory(plain):
    with pytest.raises(ConfigError, match="run_dir"):
        plain.fit(batches(), num_steps=1, evaluate=EVALUATION, callbacks=[jddp.KeepBest()])


def test_parameters_that_are_not_finite_are_not_saved_though_the_loss_was(tmp_path):
    def loss(model, batch, train):
        y = model(batch["x"], train=train).sum(-1)
        return jnp.sqrt(jnp.square(batch["flag"] * y))  # where the flag is 0, the slope is NaN

    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss, mesh=2)
    flagged = [{**make_batch(8), "flag": np.full(8, flag, np.float32)} for flag in (1, 1, 0, 1)]
    with pytest.raises(NumericsError, match="not finite after step 3"):
        ddp.fit(flagged, num_steps=4, run_dir=tmp_path, save_every_steps=1)
    step, state = newest(tmp_path / "checkpoints", ddp.init(0, flagged[0]))
    assert step == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_each_process_logs_what_it_said_and_what_ended_it(plain, tmp_path):
    with pytest.raises(NumericsError):
        plain.fit(batches(broken=4), num_steps=NUM_STEPS, run_dir=tmp_path, log_every_steps=1)
    log = (tmp_path / "logs" / "process_0.log").read_text()
    assert [f"INFO step {step}/6  loss" in log for step in (1, 2, 3, 4)] == [True] * 3 + [False]
    assert "ERROR ended by:" in log
    assert "NumericsError: The loss is nan at step 4" in log
    plain.fit(batches(), num_steps=1, run_dir=tmp_path / "other")
    assert (tmp_path / "logs" / "process_0.log").read_text() == log


# --- a directory that is moved while a run is in it ----------------------------------------------


class Moving(jddp.Callback):
    """Moves a folder after the third step, behind the save of the second."""

    def __init__(self, folder, to):
        self._folder, self._to = folder, to

    def on_step(self, run, metrics):
        if metrics["step"] == 3:
            while any(run.run_dir.glob("checkpoints/*.new")):
                time.sleep(0.01)
            self._folder.rename(self._to)


def test_a_run_whose_logs_are_moved_continues_to_its_end(plain, tmp_path):
    moving = Moving(tmp_path / "run" / "logs", tmp_path / "logs")
    run = fit(plain, batches(), tmp_path / "run", callbacks=[moving])
    assert run.step == NUM_STEPS
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in (tmp_path / "logs" / "process_0.log").read_text()


def test_a_run_whose_directory_is_moved_ends_in_good_order_and_resumes_there(plain, tmp_path):
    moving = Moving(tmp_path / "run", tmp_path / "moved")
    with pytest.raises(FileSystemError, match=f"step {NUM_STEPS} cannot be saved.*No such file"):
        fit(plain, batches(), tmp_path / "run", callbacks=[moving], save_every_steps=2)
    assert not (tmp_path / "run").exists()
    run = fit(plain, batches(), tmp_path / "moved", save_every_steps=2)
    assert run.step == NUM_STEPS
    trained = [x["step"] for x in records(tmp_path / "moved") if x["split"] == "train"]
    assert trained == [*range(1, NUM_STEPS + 1)]
