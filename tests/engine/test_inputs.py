"""What a step is given beside rows: constants, a key for the loss, a function of its rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import close, copied, equal
from sweeps import swept
from tiny import MLP, loss_fn, make_batch, take_steps, wrapped

import jddp
from jddp.ground.errors import ConfigError, UsageError
from jddp.ground.typing import TRANSFORM
from jddp.modules.base import stream


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
    options = {"mesh": mesh, "accumulate_steps": accumulate_steps}
    options |= {"reduction": jddp.Reduction(overlap=overlap)}
    # On the host, or as parameters of another model are: no step takes their memory.
    on_devices = jax.device_put(constants_of(3), jax.NamedSharding(mesh, jax.P()))
    cases = ((scaled_loss, constants_of(3)), (scaled_loss, on_devices), (written_out, None))
    for loss, given in cases:
        ddp = wrapped(loss=loss, **options)
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

    ddp, batch = wrapped(optimizer=optax.sgd(0.0), loss=counted), make_batch()
    state, losses, known = ddp.init(0, batch, constants=constants_of(1)), [], []
    for scale in (1, 2, 4):
        state, metrics = ddp.step(state, batch, constants_of(scale))
        losses.append(float(metrics["loss"]))
        known.append(len(traces))
    assert known[0] == known[-1]
    np.testing.assert_allclose(losses, np.multiply(losses[0], (1, 2, 4)), rtol=1e-6)


def test_constants_given_once_serve_every_call(tmp_path):
    ddp, batch = wrapped(loss=scaled_loss), make_batch()
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
    names, other = wrapped(loss=scaled_loss), wrapped()
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
        traced.append("init" if model.is_initializing() else "train" if train else "eval")
        return loss_fn(model, batch, train)

    ddp = jddp.DataParallel(MLP(dropout_rate=0.1), optax.sgd(0.1), counting, **options)
    state, _ = take_steps(ddp, [make_batch(rows) for rows in (32, 32, 64, 32, 64)])
    ddp.evaluate(state, [make_batch(16), make_batch(16), make_batch(3)])
    assert traced == ["init", "train", "train", "eval"]


REPLICAS = 4
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def keyed(model, batch, train, key):
    """The losses, and a number of the key."""
    losses, _ = loss_fn(model, batch, train)
    return losses, {"drawn": jax.random.uniform(key)}


def drawn(state, step, replica, micro_batch=None):
    """The number that a replica draws, by the documented rule."""
    key = state.key
    for number in (step, replica) if micro_batch is None else (step, replica, micro_batch):
        key = jax.random.fold_in(key, number)
    return float(jax.random.uniform(stream(key, "loss")))


OF_KEYS = {
    "plain": {},
    "micro-batches": {"accumulate_steps": 2},
    "overlap": {"accumulate_steps": 2, "reduction": jddp.Reduction(overlap=True)},
    "logical replicas": {"mesh": 2, "strategy": jddp.LogicalReplicas(REPLICAS)},
    "local steps": {"strategy": jddp.LocalSteps(2)},
}


@pytest.mark.parametrize("options", swept(OF_KEYS, every=3))
def test_the_key_of_a_loss_is_folded_per_step_replica_and_micro_batch(options):
    ddp = wrapped(loss=keyed, **{"mesh": REPLICAS, **options})
    state = ddp.init(0, make_batch())
    first = copied(state)
    parts = range(2) if "accumulate_steps" in options else [None]
    for step in range(2):
        state, metrics = ddp.step(state, make_batch())
        want = [drawn(first, step, r, part) for r in range(REPLICAS) for part in parts]
        assert len(set(want)) == len(want)
        np.testing.assert_allclose(metrics["drawn"], np.mean(want), rtol=1e-6)


def test_each_evaluation_draws_the_same_numbers_and_each_of_its_batches_others():
    ddp, batches = wrapped(loss=keyed, mesh=REPLICAS), [make_batch(), make_batch()]
    state = ddp.init(0, make_batch())
    before = ddp.evaluate(state, batches)["drawn"]
    state, _ = ddp.step(state, make_batch())
    assert ddp.evaluate(state, batches)["drawn"] == before
    assert ddp.evaluate(state, batches[:1])["drawn"] != before
    want = [drawn(state, number, r) for number in range(2) for r in range(REPLICAS)]
    np.testing.assert_allclose(before, np.mean(want), rtol=1e-6)

    def noise(model, batch, key):
        return jax.random.normal(key, batch["y"].shape)

    assert len(np.unique(ddp.predict(state, batches, noise))) == 2 * len(make_batch()["y"])


def test_an_argument_key_with_a_value_stays_the_losses_own():
    def loss(model, batch, train, key="y"):
        return cross_entropy(model(batch["x"], train), batch[key])

    def optional(model, batch, train, key=None):
        assert key is not None
        return loss(model, batch, train)

    for given in (loss, optional):
        take_steps(wrapped(loss=given), [make_batch()])


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Makes `x` of `half`."""

    def __call__(self, rows):
        return {k: x for k, x in rows.items() if k != "half"} | {"x": 2 * rows["half"]}


def halves(rows=16, **options):
    """A batch, and the same one whose function is still to run."""
    whole = make_batch(rows, **options)
    half = {name: x for name, x in whole.items() if name != "x"} | {"half": whole["x"] / 2}
    return whole, half | {TRANSFORM: Doubled()}


OF_ROWS = [
    {},
    {"strategy": "fsdp"},
    {"accumulate_steps": 2},
    {"reduction": jddp.Reduction(overlap=False), "ema_decay": 0.9},
    {"strategy": jddp.LogicalReplicas(8)},
]


@pytest.mark.parametrize("options", OF_ROWS, ids=str)
def test_a_step_equals_the_step_on_rows_that_are_already_transformed(options):
    ddp = wrapped(optimizer=optax.adamw(1e-2), **{"mesh": 4, **options})
    whole, half = halves()
    start = ddp.init(0, whole)
    copy = copied(start)
    want, _ = ddp.step(start, whole)
    got, _ = ddp.step(copy, half)
    equal(got.params, want.params)  # twice a half is exact


def test_evaluation_prediction_and_padding_transform_rows_too():
    ddp = wrapped(mesh=4)
    whole, half = halves(14)
    state = ddp.init(0, ddp.pad(half))
    equal(state.params, ddp.init(0, ddp.pad(whole)).params)
    equal(ddp.evaluate(state, [half]), ddp.evaluate(state, [whole]))
    equal(ddp.predict(state, [half]), ddp.predict(state, [whole]))
    copy = copied(state)
    want, _ = ddp.step(state, ddp.pad(whole))
    equal(ddp.step(copy, ddp.pad(half))[0].params, want.params)


def test_equal_functions_compile_one_step(caplog):
    ddp = wrapped()
    _, half = halves()
    state = ddp.init(0, half)
    state, _ = ddp.step(state, half)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(2):
            state, _ = ddp.step(state, ddp.shard_batch(half | {TRANSFORM: Doubled()}))
    assert not [line for line in caplog.messages if "Compiling jit(step)" in line]
