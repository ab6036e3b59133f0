"""jddp trains like the step that people write by hand, and helps the step that they keep."""

import functools

import jax
import numpy as np
import optax
import pytest
import states
from jax.sharding import PartitionSpec as P
from judge import Net, make_rows, squares
from sweeps import swept
from tiny import take_steps

import jddp
from jddp.ground.errors import ConfigError
from peers import pmap_trainer, shard_map_trainer
from peers.convnet import ConvNet

NUM_STEPS = 3
WIDTHS = (8, 16)


def loss_and_accuracy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


def loss_fn(model, batch, train):
    logits = model(batch["inputs"], train=train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses, {"accuracy": logits.argmax(-1) == batch["targets"]}


def image_batches():
    rng = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        labels = rng.integers(10, size=32, dtype=np.int32)
        images = rng.standard_normal((32, 8, 8, 1), dtype=np.float32)
        images += labels[:, None, None, None].astype(np.float32) / 5
        yield {"inputs": images, "targets": labels}


# Both add the same numbers in another order, over steps that carry the rounding on.
close = functools.partial(states.close, rtol=2e-5, atol=2e-6)


def first(tree):
    """What the first replica has of what `pmap` has stacked."""
    return jax.tree.map(lambda x: np.array(x[0]), tree)


NAMES_ITS_AXIS = ConvNet(WIDTHS, axis_name="batch")
BY_HAND = {
    "pmap": (True, ConvNet(WIDTHS), "data"),
    "shard_map": (False, ConvNet(WIDTHS), "data"),
    "by name": (True, NAMES_ITS_AXIS, "batch"),
}


@pytest.mark.parametrize("is_pmap, model, axis", swept(BY_HAND, every=3))
def test_a_trainer_written_by_hand_gets_the_same_numbers(is_pmap, model, axis):
    schedule = optax.cosine_decay_schedule(0.1, 10)
    optimizer = optax.sgd(schedule, momentum=0.9, nesterov=True)
    ddp = jddp.DataParallel(model, optimizer, loss_fn, mesh=jax.make_mesh((8,), (axis,)))
    state = ddp.init(seed=0, batch=next(image_batches()))
    variables = ddp.model(state)
    params, model_state = variables["params"], {"batch_stats": variables["batch_stats"]}
    peer = pmap_trainer.State(params, model_state, optimizer.init(params))
    if is_pmap:
        step = pmap_trainer.make_step(NAMES_ITS_AXIS, loss_and_accuracy, optimizer)
        peer, shard, read = pmap_trainer.replicate(peer), pmap_trainer.shard, first
    else:
        named = ConvNet(WIDTHS, axis_name="data")
        step = shard_map_trainer.make_step(named, loss_and_accuracy, optimizer, ddp.mesh)
        peer, read = shard_map_trainer.replicate(peer, ddp.mesh), lambda tree: tree
        shard = functools.partial(shard_map_trainer.shard, mesh=ddp.mesh)
    for batch in image_batches():
        state, metrics = ddp.step(state, batch)
        peer, peer_metrics = step(peer, shard(batch))
        close({name: metrics[name] for name in peer_metrics}, read(peer_metrics))
    close(ddp.model(state), read({"params": peer.params, **peer.model_state}))


# Of a custom step, that keeps its map and gets its mean from the optimizer.
BATCHES = [make_rows(32, seed=seed) for seed in range(NUM_STEPS)]


def own_step(optimizer, differentiate=lambda loss, params: jax.grad(loss)(params)):
    def step(params, opt_state, batch):
        def loss(params):
            return squares(lambda x: Net().apply({"params": params}, x), batch).mean()

        updates, opt_state = optimizer.update(differentiate(loss, params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


@pytest.fixture(scope="module")
def trained_by_jddp():
    """Parameters before and after, by `DataParallel`."""
    ddp = jddp.DataParallel(Net(), optax.sgd(0.1), squares)
    state = ddp.init(seed=0, batch=BATCHES[0])
    initial = ddp.model(state)["params"]
    return initial, ddp.model(take_steps(ddp, BATCHES, state)[0])["params"]


def test_average_gradients_serves_a_pmap_step_of_ones_own(trained_by_jddp):
    initial, want = trained_by_jddp
    optimizer = optax.chain(jddp.average_gradients("batch", layout="leaf"), optax.sgd(0.1))
    step = jax.pmap(own_step(optimizer), axis_name="batch")
    carry = pmap_trainer.replicate((initial, optimizer.init(initial)))
    for batch in BATCHES:
        carry = step(*carry, pmap_trainer.shard(batch))
    close(carry[0], jax.tree.map(lambda x: np.stack([x] * jax.device_count()), want))


def mapped_step(optimizer, mesh, differentiate, check_vma=True):
    """A step in a `shard_map`, which JAX checks by default."""
    specs = {"in_specs": (P(), P(), P("batch")), "out_specs": P(), "check_vma": check_vma}
    return jax.jit(jax.shard_map(own_step(optimizer, differentiate), mesh=mesh, **specs))


def summed_by_jax(loss, params):
    return jax.grad(loss)(params)


def averaged_by_the_user(loss, params):
    return jax.grad(lambda params: jax.lax.pmean(loss(params), "batch"))(params)


def each_replicas_own(loss, params):
    return jax.grad(loss)(jax.lax.pcast(params, "batch", to="varying"))


@pytest.mark.parametrize("differentiate", [summed_by_jax, averaged_by_the_user])
def test_average_gradients_refuses_gradients_that_are_already_the_same_everywhere(differentiate):
    """One of them would be N times too large, and their type does not say which it is."""
    optimizer = optax.chain(jddp.average_gradients("batch"), optax.sgd(0.1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    params = jax.eval_shape(Net().init, jax.random.key(0), BATCHES[0]["x"])["params"]
    step = mapped_step(optimizer, mesh, differentiate)
    with pytest.raises(ConfigError, match="check_vma=False, or .* jax.lax.pcast") as error:
        step.trace(params, optimizer.init(params), BATCHES[0])
    assert "\n" not in str(error.value)


LEAF, FLAT = {"layout": "leaf"}, {"layout": "flat"}
SERVED = [(1, each_replicas_own, True, LEAF), (8, each_replicas_own, True, FLAT)]
SERVED += [(8, summed_by_jax, False, FLAT)]


@pytest.mark.parametrize("num_replicas, differentiate, check_vma, options", SERVED)
def test_average_gradients_serves_a_shard_map_that_keeps_gradients_apart_or_is_not_checked(
    trained_by_jddp, num_replicas, differentiate, check_vma, options
):
    initial, want = trained_by_jddp
    optimizer = optax.chain(jddp.average_gradients("batch", **options), optax.sgd(0.1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_replicas]), ("batch",))
    step = mapped_step(optimizer, mesh, differentiate, check_vma)
    carry = shard_map_trainer.replicate((initial, optimizer.init(initial)), mesh)
    for batch in BATCHES:
        carry = step(*carry, batch)
    close(carry[0], want)
