"""A run that goes back at a loss spike, and continues with the data after it."""

import functools

import optax
import pytest
from runs import records
from states import assert_same
from tiny import MLP, Damaged, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.folders import finished
from jddp.data import Order, TrainBatches
from jddp.data.periods import OptimizerSteps
from jddp.errors import ConfigError, FileSystemError, NumericsError
from jddp.trainer.plan import Plan
from jddp.trainer.start import start

BAD = 63  # the batch that is poisoned
BEFORE = 60  # the checkpoint before it
NUM_STEPS = 75


@functools.cache
def batch(number, bad=(BAD,)):
    """Eight rows, of which those of these numbers have wrong labels and large inputs."""
    good = make_batch(8, seed=number % 5)
    return {"x": 100 * good["x"], "y": (good["y"] + 1) % 4} if number in bad else good


def batches(bad=(BAD,)):
    return (batch(number, bad) for number in range(1, 200))


@functools.cache
def wrapped(mesh=2):
    return jddp.DataParallel(MLP(dropout_rate=0.1), optax.adam(1e-3), loss_fn, mesh=mesh)


def fit(run_dir, given=None, num_steps=NUM_STEPS, ddp=None, **options):
    options = {"save_every_steps": 10, "log_every_steps": 1, **options}
    checks = jddp.Checks(on_spike="rewind")
    given = batches() if given is None else given
    plan = {"num_steps": num_steps, "run_dir": run_dir, "checks": checks, **options}
    return jddp.fit(ddp or wrapped(), given, **plan)


@functools.cache
def by_hand(mesh=2, num_steps=NUM_STEPS, left_out=range(BEFORE + 1, BAD + 1)):
    numbers = [number for number in range(1, 200) if number not in left_out]
    return take_steps(wrapped(mesh), [batch(number) for number in numbers[:num_steps]])[0]


@pytest.mark.parametrize("mesh", [1, 8])
def test_a_run_that_goes_back_equals_one_by_hand_that_leaves_the_batches_out(
    tmp_path, capsys, mesh
):
    run = fit(tmp_path, ddp=wrapped(mesh))
    assert_same(run.state, by_hand(mesh))
    said = capsys.readouterr().out
    assert f"step {BAD}: the loss jumps to" in said
    assert f"back to step {BEFORE}, and on with the data after steps 61 to 63" in said
    assert [record["step"] for record in records(tmp_path)] == list(range(1, NUM_STEPS + 1))
    assert [record["step"] for record in run.history] == list(range(1, NUM_STEPS + 1))
    assert not any("spike" in record for record in records(tmp_path))


# The loss of a step is read at once if it is evaluated, or if norms are recorded before the next
# step; else when the next step has been sent.
@pytest.mark.parametrize("every", [1, 7])
def test_the_period_of_evaluations_makes_no_difference(tmp_path, every):
    run = fit(tmp_path, evaluate=[batch(1)], eval_every_steps=every)
    assert_same(run.state, by_hand())
    evaluated = [*range(every, NUM_STEPS, every), NUM_STEPS]
    assert [x["step"] for x in run.evaluations] == evaluated


def test_records_of_norms_make_no_difference(tmp_path):
    checks, every = jddp.Checks(on_spike="rewind"), BAD + 1
    plan = Plan(
        NUM_STEPS,
        save_every=OptimizerSteps(10),
        norms_every_steps=every,
        checks=checks,
        run_dir=tmp_path,
    )
    assert_same(start(wrapped(), batches(), plan, None).state, by_hand())


def test_a_spike_in_the_last_step_is_gone_back_from(tmp_path):
    assert_same(fit(tmp_path, num_steps=BAD).state, by_hand(num_steps=BAD))


class Break(jddp.Callback):
    """Breaks a run off after a step, the first time: as an exception, or as if it were killed."""

    def __init__(self, step, how=RuntimeError):
        self.step, self.how = step, how

    def on_step(self, run, metrics):
        if metrics["step"] == self.step:
            self.step = None
            raise self.how


# At an exception a run is saved one step later, unless the loss has jumped there or before.
@pytest.mark.parametrize("step, before", [(61, 62), (62, 60), (63, 60), (64, 60), (72, 60)])
def test_a_run_that_is_broken_off_and_resumes_goes_back_to_the_newest_checkpoint(
    tmp_path, step, before
):
    callbacks = [Break(step)]
    with pytest.raises(RuntimeError):
        fit(tmp_path, callbacks=callbacks)
    left_out = range(before + 1, BAD + 1)
    assert_same(fit(tmp_path, callbacks=callbacks).state, by_hand(left_out=left_out))


class Save(jddp.Callback):
    """Saves a state that is abandoned later, the first time."""

    def __init__(self, step):
        self.step = step

    def on_step(self, run, metrics):
        if metrics["step"] == self.step:
            self.step = None
            run.save()


@pytest.mark.parametrize("step", [BAD - 1, BAD])
def test_a_killed_run_does_not_resume_from_a_state_that_it_has_abandoned(tmp_path, step):
    callbacks = [Save(step), Break(BAD + 2, KeyboardInterrupt)]
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=callbacks)
    assert finished(tmp_path / "checkpoints")[-1] == BEFORE
    assert_same(fit(tmp_path).state, by_hand())


def test_before_the_first_checkpoint_that_is_due_a_run_goes_back_to_its_beginning(tmp_path):
    callbacks = [Break(5, KeyboardInterrupt)]
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=callbacks)
    assert finished(tmp_path / "checkpoints") == [0]
    run = fit(tmp_path, save_every_steps=100)
    assert_same(run.state, by_hand(left_out=range(1, BAD + 1)))


def test_without_a_checkpoint_from_before_the_run_ends_and_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointFolder, "restore", lambda *state, **before: None)
    with pytest.raises(FileSystemError, match=f"cannot go back from step {BAD}: .* no checkpoint"):
        fit(tmp_path)
    assert finished(tmp_path / "checkpoints")[-1] == BEFORE


def test_the_third_spike_after_one_checkpoint_ends_the_run(tmp_path):
    with pytest.raises(NumericsError, match="gone back to step 60 2 times"):
        fit(tmp_path, batches(range(BAD, 200)))


@pytest.mark.parametrize("given", [{"run_dir": None}, {"save_every_steps": None}])
def test_without_checkpoints_to_go_back_to_it_is_refused(tmp_path, given):
    with pytest.raises(ConfigError, match="on_spike='rewind' needs checkpoints"):
        fit(**{"run_dir": tmp_path, **given})


def test_some_epochs_have_as_many_steps_less_as_batches_were_left_out(tmp_path):
    whole = {name: make_batch(8 * 5, seed=0)[name].repeat(20, 0)[: 8 * 80] for name in ("x", "y")}
    order = Order(len(whole["y"]), seed=0, shuffle=False)
    batches = TrainBatches(Damaged(whole), global_batch_size=8, order=order, num_epochs=1)
    run = fit(tmp_path, batches, None, num_epochs=None)
    assert run.step == 77
