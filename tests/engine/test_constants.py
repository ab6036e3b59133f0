"""Constants, gradients without an update, and how often a model is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import close, equal
from sweeps import swept
from tiny import MLP, loss_fn, make_batch, take_steps

import jddp
from jddp.ground.errors import ConfigError, UsageError


def scaled_loss(model, batch, train, constants):
    losses, metrics = loss_fn(model, batch, train)
    return losses * constants["weights"][batch["y"]] * constants["scale"], metrics


def constants_of(scale):
    return {"scale": np.float32(scale), "weights": np.arange(1, 5, dtype=np.float32)}


@pytest.mark.parametrize(
    "accumulate_steps, overlap", swept([(1, False), (2, False), (2, True)], every=3)
)
def test_constants_reach_every_replica_and_micro_batch_whole(mesh, accumulate_steps, overlap):
    def written_out(model, batch, train):
        return scaled_loss(model, batch, train, jax.tree.map(jnp.asarray, constants_of(3)))

    batch, ends = make_batch(), []
    options = {
        "mesh": mesh,
        "accumulate_steps": accumulate_steps,
        "reduction": jddp.Reduction(overlap=overlap),
    }
    # On the host, or as parameters of another model are: no step takes their memory.
    on_devices = jax.device_put(constants_of(3), jax.NamedSharding(mesh, jax.P()))
    cases = ((scaled_loss, constants_of(3)), (scaled_loss, on_devices), (written_out, None))
    for loss, given in cases:
        ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss, **options)
        state = ddp.init(0, batch, constants=given)
        state, metrics = ddp.step(state, batch, constants=given)
        grads, _ = ddp.gradients(state, batch, constants=given)
        evaluated = ddp.evaluate(state, [batch, make_batch(5)], constants=given)
        ends.append((state.params, metrics, grads, evaluated))
    for end in ends[:2]:
        close(end, ends[2])


def test_other_values_of_constants_trace_and_compile_nothing():
    traces = []

    def counted(model, batch, train, constants):
        traces.append(train)
        return scaled_loss(model, batch, train, constants)

    ddp = jddp.DataParallel(MLP(), optax.sgd(0.0), counted)
    batch = make_batch()
    state, losses, known = ddp.init(0, batch, constants=constants_of(1)), [], []
    for scale in (1, 2, 4):
        state, metrics = ddp.step(state, batch, constants_of(scale))
        losses.append(float(metrics["loss"]))
        known.append(len(traces))
    assert known[0] == known[-1]
    np.testing.assert_allclose(losses, np.multiply(losses[0], (1, 2, 4)), rtol=1e-6)


def test_constants_given_once_serve_every_call(tmp_path):
    batch = make_batch()
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), scaled_loss)
    given = ddp.with_constants(constants_of(2))
    run = jddp.fit(given, [batch] * 3, num_steps=3, evaluate=[batch], run_dir=tmp_path)
    state = ddp.init(0, batch, constants=constants_of(2))
    for _ in range(3):
        state, _ = ddp.step(state, batch, constants=constants_of(2))
    equal(run.state.params, state.params)
    assert given.latest is ddp.latest
    assert "gradients" in str(jddp.explain(given, batch))
    assert jddp.memory(given, batch).total > 0


def test_a_loss_that_names_constants_is_not_run_without_nor_another_with_them():
    names, other = (jddp.DataParallel(MLP(), optax.sgd(0.1), x) for x in (scaled_loss, loss_fn))
    with pytest.raises(UsageError, match="names `constants`, and was given none"):
        names.init(0, make_batch())
    with pytest.raises(ConfigError, match="has no argument of that name"):
        other.step(other.init(0, make_batch()), make_batch(), constants=constants_of(1))


SPLIT = {"reduction": jddp.Reduction(overlap=True), "accumulate_steps": 2}


@pytest.mark.parametrize(
    "options", swept([{"reduction": jddp.Reduction(overlap=False)}, SPLIT], every=2), ids=len
)
def test_a_model_is_traced_once_to_make_it_and_once_for_each_form_of_rows(options):
    traced = []

    def counting(model, batch, train):
        kind = "init" if model.is_initializing() else "train" if train else "eval"
        traced.append(kind)
        return loss_fn(model, batch, train)

    ddp = jddp.DataParallel(MLP(dropout_rate=0.1), optax.sgd(0.1), counting, **options)
    state, _ = take_steps(ddp, [make_batch(rows) for rows in (32, 32, 64, 32, 64)])
    ddp.evaluate(state, [make_batch(16), make_batch(16), make_batch(3)])
    assert traced == ["init", "train", "train", "eval"]
