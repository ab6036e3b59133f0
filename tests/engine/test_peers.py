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
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9, nesterov=True)
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
WAYS = {
    "summed by JAX": lambda loss, params: jax.grad(loss)(params),
    "averaged by the user": lambda loss, params: jax.grad(
        lambda params: jax.lax.pmean(loss(params), "batch")
    )(params),
    "each replica's own": lambda loss, params: jax.grad(loss)(
        jax.lax.pcast(params, "batch", to="varying")
    ),
}


def own_step(optimizer, way):
    def step(params, opt_state, batch):
        def loss(params):
            return squares(lambda x: Net().apply({"params": params}, x), batch).mean()

        updates, opt_state = optimizer.update(WAYS[way](loss, params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def mapped_step(optimizer, mesh, way, check_vma=True):
    """A step in a `shard_map`, which JAX checks by default."""
    specs = {"in_specs": (P(), P(), P("batch")), "out_specs": P(), "check_vma": check_vma}
    return jax.jit(jax.shard_map(own_step(optimizer, way), mesh=mesh, **specs))


@pytest.mark.parametrize("way", ["summed by JAX", "averaged by the user"])
def test_average_gradients_refuses_gradients_that_are_already_the_same_everywhere(way):
    """One of them would be N times too large, and their type does not say which it is."""
    optimizer = optax.chain(jddp.average_gradients("batch"), optax.sgd(0.1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    params = jax.eval_shape(Net().init, jax.random.key(0), BATCHES[0]["x"])["params"]
    step = mapped_step(optimizer, mesh, way)
    with pytest.raises(ConfigError, match="check_vma=False, or .* jax.lax.pcast") as error:
        step.trace(params, optimizer.init(params), BATCHES[0])
    assert "\n" not in str(error.value)


SERVED = {
    "pmap": (8, "summed by JAX", None, "leaf"),
    "one replica": (1, "each replica's own", True, "leaf"),
    "apart": (8, "each replica's own", True, "flat"),
    "unchecked": (8, "summed by JAX", False, "flat"),
}


@pytest.mark.parametrize("num, way, check_vma, layout", SERVED.values(), ids=SERVED)
def test_average_gradients_serves_a_step_that_keeps_gradients_apart_or_is_not_checked(
    num, way, check_vma, layout
):
    ddp = jddp.DataParallel(Net(), optax.sgd(0.1), squares)
    state = ddp.init(0, BATCHES[0])
    params = jax.device_get(state.params)
    want, _ = take_steps(ddp, BATCHES, state)
    optimizer = optax.chain(jddp.average_gradients("batch", layout=layout), optax.sgd(0.1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num]), ("batch",))
    if check_vma is None:
        step, shard, read = jax.pmap(own_step(optimizer, way), "batch"), pmap_trainer.shard, first
        carry = pmap_trainer.replicate((params, optimizer.init(params)))
    else:
        step, shard, read = mapped_step(optimizer, mesh, way, check_vma), dict, dict
        carry = shard_map_trainer.replicate((params, optimizer.init(params)), mesh)
    for batch in BATCHES:
        carry = step(*carry, shard(batch))
    close(read(carry[0]), want.params)
