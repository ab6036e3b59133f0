"""A moving average of the parameters is evaluated with a moving average of batch statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from judge import host
from states import close, equal
from sweeps import swept
from tiny import ConvNet, NnxConvNet, Of, loss_fn, make_batch

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.runs.saved import Saved

BATCHES = [make_batch(seed=seed) for seed in range(4)]
DECAY = 0.75
PLACES = {
    "sync": {},
    "broadcast": {"batch_norm": "broadcast"},
    "local": {"batch_norm": "local"},
    "logical replicas": {"strategy": jddp.LogicalReplicas(2), "batch_norm": "local"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp", "skip_nonfinite": True},
    "local steps": {"strategy": jddp.LocalSteps(2), "batch_norm": "local"},
}


def averaging(model=None, **options):
    return jddp.DataParallel(
        model or ConvNet(), optax.sgd(0.1), loss_fn, mesh=2, ema_decay=DECAY, **options
    )


def mean_over_replicas(x, one):
    return x.mean(0) if x.ndim > one.ndim else x


@pytest.mark.parametrize("place", swept([*PLACES], every=2))
def test_batch_statistics_are_averaged_with_the_parameters(place):
    """The judge averages by hand what the state holds after each step."""
    ddp = averaging(**PLACES[place])
    state = ddp.init(0, BATCHES[0])
    want = host((state.params, state.model_state))
    for batch in BATCHES:
        state, _ = ddp.step(state, batch)
        now = host((state.params, state.model_state))
        want = jax.tree.map(lambda a, x: DECAY * a + (1 - DECAY) * x, want, now)
    got = host(ddp.model(state, "ema"))
    want = {"params": want[0], **want[1]}
    close(got, jax.tree.map(mean_over_replicas, want, got))
    plain = jddp.DataParallel(ConvNet(), optax.sgd(0.1), loss_fn, mesh=2, batch_norm="broadcast")
    alone = plain.init(0, BATCHES[0], params=got)
    assert ddp.evaluate(state, BATCHES, "ema") == pytest.approx(plain.evaluate(alone, BATCHES))
    equal(ddp.model(state)["params"], ddp.model(state, "params")["params"])


def test_statistics_of_an_nnx_module_are_averaged_and_its_counts_are_not():
    class Counting(NnxConvNet):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.num_calls = nnx.BatchStat(jnp.int32(0))

        def __call__(self, x, train=None):
            self.num_calls[...] += 1
            return super().__call__(x)

    ddp = averaging(Counting(nnx.Rngs(0)))
    state, want = ddp.init(0, BATCHES[0]), np.zeros(4)
    for batch in BATCHES:
        state, _ = ddp.step(state, batch)
        want = DECAY * want + (1 - DECAY) * np.asarray(ddp.model(state).norm.mean[...])
    got = ddp.model(state, "ema")
    np.testing.assert_allclose(got.norm.mean[...], want, rtol=1e-5)
    assert int(got.num_calls[...]) == 4


def test_frozen_parameters_and_state_of_whole_numbers_have_no_average():
    ddp = averaging(frozen=["Dense_0/bias"])
    state = ddp.init(0, BATCHES[0])
    assert jax.tree.structure(state.ema_state) == jax.tree.structure(
        {"params": {"Dense_0": {"bias": None}}, "batch_stats": state.model_state["batch_stats"]}
    )
    mlp = Of(lambda m, x, train: nn.Dense(4)(x))
    assert not jax.tree.leaves(averaging(mlp).init(0, BATCHES[0]).ema_state)


def test_a_checkpoint_without_averaged_statistics_resumes_from_the_raw_ones(tmp_path, caplog):
    """As versions have written it that averaged parameters alone."""
    ddp = averaging(batch_norm="local")
    state, _ = ddp.step(ddp.init(0, BATCHES[0]), BATCHES[0])
    older = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    layouts = ddp.steps.layouts(state).replace(ema_state=None)
    older.save(1, state.replace(ema_state=None), {}, layouts)
    older.close()
    restored, _ = jddp.Checkpoints(tmp_path / "checkpoints").restore(ddp)
    equal(restored.ema_state, state.model_state)
    assert "batch statistics" in caplog.text
    statistics = host(state.model_state)  # the step takes both
    restored, _ = ddp.step(restored, BATCHES[1])
    want = jax.tree.map(
        lambda a, x: DECAY * a + (1 - DECAY) * x, statistics, host(restored.model_state)
    )
    close(restored.ema_state, want)
    caplog.clear()
    opened = jddp.open_run(tmp_path, model=ConvNet(), loss_fn=loss_fn, params="ema")
    means = jax.tree.map(lambda x: x.mean(0), statistics)
    close(opened._ddp.model(opened.state, "ema")["batch_stats"], means["batch_stats"])
    assert "batch statistics" in caplog.text


@pytest.mark.parametrize("name", ["params", "ema"])
def test_an_export_by_the_names_of_a_library_has_the_statistics_of_its_parameters(tmp_path, name):
    ddp = averaging()
    state, _ = ddp.step(ddp.init(0, BATCHES[0]), BATCHES[0])
    checkpoints = jddp.Checkpoints(tmp_path)
    checkpoints.save(ddp, state)
    checkpoints.wait()
    params, others = Saved(tmp_path / "1", {"plan": {"eval_params": name}}).evaluated_values()
    equal({"params": params, **others}, ddp.model(state, name))
