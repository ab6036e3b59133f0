"""NaN and infinity: steps are skipped bitwise, counted, and reported when they do not stop."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from runs import records
from states import assert_same, copied
from sweeps import swept
from tiny import MLP, ConvNet, NnxConvNet, Of, loss_fn, make_batch, make_batches, take_steps

import jddp
from jddp.data import ArrayExamples, TrainBatches
from jddp.ground.errors import NumericsError
from jddp.trainer.numerics import Numerics, Sent
from jddp.trainer.run import Progress
from jddp.zoo.losses import cross_entropy

wrapped = functools.partial(tiny.wrapped, optimizer=optax.adam(0.01), skip_nonfinite=True)


def skips(number):
    return jddp.Checks(max_consecutive_skips=number)


def counting():
    """A hook with a memory, which every step changes."""

    def reduce(bucket, memory, axis):
        return jax.lax.pmean(bucket, axis), memory + 1.0

    return jddp.CommHook(lambda plan: jnp.zeros(3), reduce)


def slope(model, batch, train):
    """Finite where the flag is 0, but for its gradient."""
    y = model(batch["x"], train=train).sum(-1)
    return jnp.sqrt(jnp.square(batch["flag"] * y))


def broken(batch, row):
    x = batch["x"].copy()
    x[row] = np.nan
    return {**batch, "x": x}


def flagged(seed, flag):
    return {**make_batch(8, seed=seed), "flag": np.full(8, flag, np.float32)}


SKIPPED = {
    "everything": (0, ConvNet(dropout_rate=0.3), {"ema_decay": 0.5, "max_grad_norm": 1.0}),
    "local": (7, ConvNet(), {"batch_norm": "local", "mesh": 4}),
    "nnx": (0, NnxConvNet(nnx.Rngs(0)), {"accumulate_steps": 2}),
    "hook": (7, MLP(), {"reduction": jddp.Reduction(hook=counting()), "max_grad_norm": 1.0}),
    "loss scale": (0, MLP(), {"precision": jddp.Precision(loss_scale="dynamic")}),
    "local steps": (7, MLP(), {"strategy": jddp.LocalSteps(4)}),
}


@pytest.mark.parametrize("row, model, options", swept(SKIPPED, every=2))
def test_a_step_that_is_not_finite_or_above_its_limit_changes_only_its_counts(row, model, options):
    ddp = wrapped(model, **options)
    state, metrics = take_steps(ddp, [make_batch(8)])
    assert (int(state.skipped), float(metrics["skipped"])) == (0, 0)
    good, limit = make_batch(8, seed=1), 0.5 * float(metrics["loss"])
    # A step that is not finite may lower the loss scale.
    bad = [] if "precision" in options else [(broken(good, row), np.inf)]
    for count, (batch, most) in enumerate([*bad, (good, limit)], 1):
        before = copied(state)
        state, metrics = ddp.step(state, batch, loss_limit=most)
        assert (int(state.step), int(state.skipped)) == (1 + count, count)
        assert float(metrics["skipped"]) == count
        assert_same(state.replace(step=before.step, skipped=before.skipped), before)
    assert int(ddp.step(state, good, loss_limit=np.inf)[0].skipped) == count


def keeping(m, x, flag):
    kept = m.variable("kept", "root", jnp.zeros, ())
    highest = m.variable("kept", "highest", lambda: jnp.float32(-jnp.inf))
    if not m.is_initializing():
        kept.value = jnp.sqrt(flag.min())
    return nn.Dense(1)(x) + 0 * highest.value.astype(x.dtype).clip(0)


AVERAGED = {"state": {"kept": "mean"}}


def kept_loss(model, batch, train):
    return jnp.square(model(batch["x"], batch["flag"])[:, 0])


# The loss is finite, and one replica alone may see the number.
ELSEWHERE = {
    "gradient": (MLP(), slope, 0, {}),
    "averaged": (Of(keeping), kept_loss, -1, AVERAGED),
    "per replica": (Of(keeping), kept_loss, -1, {"state": {"kept": "per_replica"}}),
}


@pytest.mark.parametrize("model, loss, flag, options", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_not_finite_elsewhere_is_skipped_on_all_replicas(model, loss, flag, options):
    ddp = wrapped(model, loss=loss, **options)
    state, metrics = take_steps(ddp, [flagged(0, 1)])
    assert int(metrics["skipped"]) == 0  # what was infinite from the start is no reason
    before = copied(state)
    batch = flagged(1, 1)
    batch["flag"][7] = flag
    state, metrics = ddp.step(state, batch)
    assert np.isfinite(metrics["loss"])
    assert int(state.skipped) == 1
    assert_same(state.replace(step=before.step, skipped=before.skipped), before)


@pytest.mark.parametrize("options", [{}, {"precision": jddp.Precision(loss_scale="dynamic")}])
def test_other_state_that_stays_not_finite_ends_the_run_and_leaves_the_loss_scale(options):
    ddp = wrapped(Of(keeping), loss=kept_loss, **AVERAGED, **options)
    with pytest.raises(NumericsError, match="3 in a row .* other state are not finite") as caught:
        jddp.fit(ddp, [flagged(0, -1)] * 8, num_steps=8, checks=skips(3))
    scales = {record.get("loss_scale") for record in caught.value.run.history}
    assert len(scales) <= 1


def test_finite_steps_below_a_limit_have_the_bits_of_steps_that_none_watches():
    def end(skip, limit=None):
        ddp = wrapped(ConvNet(dropout_rate=0.3), skip_nonfinite=skip)
        state = ddp.init(0, make_batch(8))
        for batch in make_batches(4):
            state, _ = ddp.step(state, batch, loss_limit=limit)
        return state

    unwatched = end(skip=False)
    assert_same(unwatched, end(skip=True))
    assert_same(unwatched, end(skip=False, limit=100.0))


@pytest.mark.slow
def test_layers_are_measured_as_one_device_would_measure_them():
    batch, ddp = make_batch(8), wrapped(mesh=4)
    state = ddp.init(0, batch)
    before = copied(state)
    layers = jddp.diagnose(ddp, state, batch)
    assert_same(state, before)

    def mean(params):
        return loss_fn(MLP().bind({"params": params}), batch, False)[0].mean()

    grads = jax.grad(mean)(before.params)
    for layer, name in itertools.product(("Dense_0", "Dense_1"), ("kernel", "bias")):
        reported = layers[f"{layer}/{name}"]
        norms = [np.linalg.norm(tree[layer][name]) for tree in (before.params, grads)]
        found = reported["parameter"], reported["gradient"]
        np.testing.assert_allclose(found, norms, rtol=1e-5)
        assert reported["not_finite"] == 0
    reported = jddp.diagnose(ddp, state, broken(batch, 5))
    assert reported["Dense_0/kernel"]["not_finite"] == 16 * 16


SKIPPING = {"num_steps": 8, "log_every_steps": 1}


def batches(*wrong):
    """Eight batches, those of these numbers with a NaN in row 3."""
    return [broken(x, 3) if i in wrong else x for i, x in enumerate(make_batches(8), 1)]


def test_a_run_skips_counts_and_says_so_once_for_a_row(tmp_path, capsys):
    run = jddp.fit(wrapped(), batches(2, 4, 5), run_dir=tmp_path, checks=skips(3), **SKIPPING)
    assert [record["skipped"] for record in records(tmp_path)] == [0, 1, 1, 2, 3, 3, 3, 3]
    assert [r["step"] for r in records(tmp_path) if r["loss"] is None] == [2, 4, 5]
    said = capsys.readouterr().out
    assert said.count("is skipped: its loss, gradients or other state are not finite") == 2
    assert "step 4 is skipped" in said
    assert_same(run.state, take_steps(wrapped(), batches(2, 4, 5))[0])


@pytest.mark.parametrize("save_every_steps", swept([3, None], every=2))
def test_too_many_skips_in_a_row_end_the_run_with_the_evidence(tmp_path, save_every_steps):
    plan = {"checks": skips(3), "save_every_steps": save_every_steps, **SKIPPING}
    with pytest.raises(NumericsError, match="at step 6, the last of 3 in a row") as caught:
        jddp.fit(wrapped(ConvNet(dropout_rate=0.3)), batches(2, 4, 5, 6), run_dir=tmp_path, **plan)
    assert caught.value.exit_code == 80
    assert "Not finite: inputs of rows 3; gradients of " in str(caught.value)
    report = json.loads((tmp_path / "nonfinite" / "step_6" / "report.json").read_text())
    assert (report["step"], report["loss"], report["skipped_in_a_row"]) == (6, "nan", 3)
    assert (report["inputs_not_finite"], report["examples"]) == ([3], None)
    assert report["layers_after_step"] == 6
    ddp = wrapped(ConvNet(dropout_rate=0.3))
    state, _ = take_steps(ddp, batches(2, 4, 5, 6)[:5])
    layers = jddp.diagnose(ddp, state, batches(6)[5])
    assert report["layers"] == jax.tree.map(lambda x: str(x) if x != x else x, layers)


@pytest.mark.parametrize("skip, reported", [(True, "gradients of"), (False, "examples")])
def test_the_evidence_names_examples_where_batches_know_them(tmp_path, skip, reported):
    class Damaged(ArrayExamples):
        def take(self, indices):
            batch = super().take(indices)
            batch["x"][np.isin(indices, [5, 17])] = np.nan
            return batch

    examples = TrainBatches(Damaged(make_batch(40)), global_batch_size=8, seed=0)
    plan = {"run_dir": tmp_path, "checks": skips(1)}
    with pytest.raises(NumericsError, match=reported):
        jddp.fit(wrapped(skip_nonfinite=skip), examples, num_steps=20, **plan)
    (folder,) = (tmp_path / "nonfinite").iterdir()
    report = json.loads((folder / "report.json").read_text())
    assert report["inputs_not_finite"]
    assert set(report["inputs_not_finite"]) <= {5, 17}
    assert len(report["examples"]) == 8


@pytest.mark.parametrize("wrong", [4, -1])
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True, "mesh": 4}])
def test_labels_beyond_the_outputs_are_named_before_the_learning_rate(options, wrong):
    batch = {"x": make_batch(8)["x"], "label": np.array([0, 1, 2, 3, wrong, 0, 0, 0], np.int32)}
    ddp = wrapped(loss=cross_entropy, **{"skip_nonfinite": False, **options})
    message = f"'label' is {min(0, wrong)} to {max(3, wrong)} there.*4 outputs, for 0 to 3"
    with pytest.raises(NumericsError, match=message) as caught:
        jddp.fit(ddp, [batch] * 3, num_steps=3, checks=skips(2))
    assert "learning rate" not in str(caught.value)


def test_where_labels_fit_or_outputs_are_unknown_the_learning_rate_is_named(tmp_path, monkeypatch):
    def of_other_inputs(model, batch, train):
        return loss_fn(model, {**batch, "x": batch["z"]}, train)

    monkeypatch.chdir(tmp_path)
    batch = broken(make_batch(8), 3)
    unknown = {"z": batch["x"], "y": np.full(8, 9, np.int32)}
    for loss, rows in ((loss_fn, batch), (of_other_inputs, unknown)):
        with pytest.raises(NumericsError, match=r"at step 1\. Lower the learning rate"):
            jddp.fit(wrapped(loss=loss, skip_nonfinite=False), [rows], num_steps=1)
    assert not list(tmp_path.iterdir())  # no directory, no evidence


def test_evidence_of_half_precision_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "nonfinite").write_bytes(b"")
    batch = broken(make_batch(8), 3)
    half = [{**batch, "x": batch["x"].astype(jnp.bfloat16)}]
    with pytest.raises(NumericsError, match="inputs of rows 3"):
        jddp.fit(wrapped(skip_nonfinite=False), half, num_steps=1, run_dir=tmp_path)
    assert "cannot be written" in caplog.text


def test_an_infinity_that_an_optimizer_means_is_saved_and_a_nan_is_not(tmp_path):
    def fit(more):
        def update(grads, state, params=None):
            return grads, {"best": state["best"], "memory": state["memory"] + jnp.float32(more)}

        first = {"best": jnp.float32(np.inf), "memory": jnp.float32(0)}
        odd = optax.GradientTransformation(lambda params: first, update)
        plan = {"run_dir": tmp_path / str(more), "save_every_steps": 1}
        return jddp.fit(tiny.wrapped(optimizer=odd), make_batches(2), num_steps=2, **plan)

    with pytest.raises(NumericsError, match="The state is not finite after step 1"):
        fit(np.nan)
    assert np.isinf(fit(1.0).state.opt_state["best"])
    assert (tmp_path / "1.0" / "checkpoints" / "2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"strategy": "zero1"}])
def test_the_check_for_nan_of_jax_finds_one_also_after_it_was_off_for_a_while(options):
    def loss(model, batch, train):
        return jnp.log(batch["sign"] + 0 * model(batch["x"], train=train).sum(-1))

    good = make_batch() | {"sign": np.ones(16, np.float32)}
    bad = good | {"sign": -good["sign"]}
    with jax.debug_nans(True):
        with jax.debug_nans(False):  # as functions of JAX do
            pass
        ddp = wrapped(loss=loss, skip_nonfinite=False, **options)
        state, _ = ddp.step(ddp.init(0, good), good)
        for call in (lambda: ddp.step(state, bad),) * 2 + (lambda: ddp.evaluate(state, [bad]),):
            with pytest.raises(FloatingPointError, match="nan"):
                call()


def test_the_recorded_learning_rate_is_the_one_that_was_applied():
    rate = optax.linear_schedule(1.0, 0.0, 10)
    ddp = wrapped(optimizer=optax.sgd(rate), loss=slope)
    batches = [flagged(i, 0 if i in (1, 2, 3) else 1) for i in range(8)]
    found = jddp.fit(ddp, batches, learning_rate=rate, **SKIPPING).history
    want = 1 - np.array([0, 1, 1, 1, 1, 2, 3, 4]) / 10  # by the updates before
    np.testing.assert_allclose([record["learning_rate"] for record in found], want, rtol=1e-6)


def test_a_row_of_skips_is_counted_by_what_a_checkpoint_keeps():
    """Skipped because of other state: the loss is finite, and the loss scale stays."""
    numerics, progress = Numerics(None, None, None, jddp.Checks(on_spike=None)), Progress()
    for step in range(1, 7):
        metrics = {"loss": 1.0, "skipped": float(step), "loss_scale": 8.0}
        progress, *_ = numerics.look(progress, Sent(step, metrics, {}, {}), None)
        progress = Progress.from_json(step, json.loads(json.dumps(progress.to_json())))
        assert progress.skipped == (step, step - 1, 8.0)
