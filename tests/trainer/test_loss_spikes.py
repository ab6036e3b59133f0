"""A batch with a loss far above those before it: reported, or its update left out."""

import functools

import numpy as np
import optax
import pytest
import tiny
from flax import nnx
from runs import records
from states import assert_same, copied
from sweeps import swept
from tiny import MLP, ConvNet, NnxConvNet, make_batch, take_steps

import jddp
from jddp.ground.errors import NumericsError

BAD = 60  # the step of the poisoned batch


def batches(bad=(BAD,), num=70):
    """Batches of eight rows, of which those of these numbers have wrong labels and large inputs."""
    for step in range(1, num + 1):
        batch = make_batch(8, seed=step % 5)
        yield {"x": 100 * batch["x"], "y": (batch["y"] + 1) % 4} if step in bad else batch


wrapped = functools.partial(tiny.wrapped, optimizer=optax.adam(1e-3))


def fit(ddp, action, given=None, num_steps=70, **options):
    checks = jddp.Checks(on_spike=action, **options.pop("checks", {}))
    return jddp.fit(ddp, given or batches(), num_steps=num_steps, checks=checks, **options)


def spiking(history):
    return [record["step"] for record in history if "spike" in record]


def test_a_spike_is_reported_in_a_line_and_a_record_and_changes_nothing(tmp_path, capsys):
    run = fit(wrapped(), "warn", run_dir=tmp_path)
    said = capsys.readouterr().out
    assert said.count("the loss jumps to") == 1
    assert f"step {BAD}: the loss jumps to" in said
    assert spiking(records(tmp_path)) == [BAD]
    assert records(tmp_path)[1]["spike"] > 20
    assert_same(run.state, fit(wrapped(), None).state)
    assert "the loss jumps" not in capsys.readouterr().out


SKIPPED = {
    "everything": (ConvNet(dropout_rate=0.3), {"ema_decay": 0.5, "max_grad_norm": 1.0}),
    "8 replicas": (ConvNet(), {"mesh": 8, "batch_norm": "local"}),
    "1 replica": (MLP(), {"mesh": 1}),
    "nnx": (NnxConvNet(nnx.Rngs(0)), {"accumulate_steps": 2}),
    "loss scale": (MLP(), {"precision": jddp.Precision(loss_scale="dynamic")}),
    "fsdp": (MLP(), {"strategy": "fsdp", "skip_nonfinite": True}),
    "logical replicas": (MLP(), {"strategy": jddp.LogicalReplicas(4)}),
    "local steps": (MLP(), {"strategy": jddp.LocalSteps(4)}),
}


@pytest.mark.parametrize("model, options", swept(SKIPPED, every=3))
def test_a_step_above_its_limit_changes_nothing_but_its_counts(model, options):
    ddp = wrapped(model, **options)
    state, metrics = take_steps(ddp, [make_batch(16)])
    before, limit = copied(state), float(metrics["loss"])
    state, metrics = ddp.step(state, make_batch(16, seed=1), loss_limit=0.5 * limit)
    assert (int(state.step), int(state.skipped), float(metrics["skipped"])) == (2, 1, 1)
    assert_same(state.replace(step=before.step, skipped=before.skipped), before)
    state, metrics = ddp.step(state, make_batch(16, seed=1), loss_limit=np.inf)
    assert int(state.skipped) == 1


def test_a_step_below_its_limit_is_bitwise_the_step_without_one():
    ddp, given = wrapped(ConvNet(dropout_rate=0.3)), [make_batch(8, seed=i) for i in range(4)]
    state, _ = take_steps(ddp, given)
    limited = ddp.init(0, given[0])
    for batch in given:
        limited, _ = ddp.step(limited, batch, loss_limit=100.0)
    assert_same(limited, state)


def test_a_loss_that_is_not_finite_is_left_to_the_other_guard():
    batch = make_batch(8)
    for skips in (False, True):
        ddp = wrapped(skip_nonfinite=skips)
        state, _ = take_steps(ddp, [batch])
        state, _ = ddp.step(state, {**batch, "x": batch["x"] * np.nan}, loss_limit=0.1)
        assert int(state.skipped) == skips


@pytest.mark.parametrize("mesh", swept([8, 1], every=2))
def test_a_run_that_skips_a_spike_ends_as_one_whose_poisoned_step_is_undone_by_hand(
    tmp_path, capsys, mesh
):
    ddp = wrapped(MLP(dropout_rate=0.1), mesh=mesh)
    run = fit(ddp, "skip", run_dir=tmp_path)
    assert "its update is left out" in capsys.readouterr().out
    assert int(run.state.skipped) == 1
    assert spiking(records(tmp_path)) == [BAD]
    state = None
    for step, batch in enumerate(batches(), 1):
        kept = state and copied(state)
        state, _ = take_steps(ddp, [batch], state)
        if step == BAD:
            state = kept.replace(step=state.step, skipped=state.skipped + 1)
    assert_same(run.state, state)


def test_too_many_spikes_in_a_row_end_the_run_with_the_evidence(tmp_path):
    bad = range(BAD, 71)
    checks = {"checks": {"max_consecutive_skips": 3}}
    message = f"at step {BAD + 2}, the last of 3 in a row .*: the loss is far above .* before, 1"
    with pytest.raises(NumericsError, match=message):
        fit(wrapped(), "skip", batches(bad), run_dir=tmp_path, **checks)
    assert (tmp_path / "nonfinite" / f"step_{BAD + 2}" / "report.json").exists()
