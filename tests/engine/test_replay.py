"""A single wrong bit on one device is named with the device and the first array that it changed.

The shim: a constant of the loss, of which one device has another copy, flips a bit there each time
that this device computes. A fault that passes flips it in one computation alone.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from states import assert_same, bent, copied
from tiny import Of, make_batch

import jddp
from jddp.engine import replay
from jddp.engine.mesh import replicated
from jddp.engine.replay import ReplayedStep
from jddp.engine.step import make_step
from jddp.ground.errors import ConfigError, ReplicaMismatchError

NUM_DEVICES = 4
KERNEL = (8, 4)  # of the last layer
ROWS, WIDTH = 4, 8  # activations of a replica


def flipped(x, mask):
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ mask
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@jax.custom_vjp
def on_the_way(x, mask):
    return flipped(x, mask)


@jax.custom_vjp
def on_the_way_back(x, mask):
    return x


on_the_way.defvjp(lambda x, mask: (flipped(x, mask), None), lambda _, g: (g, None))
on_the_way_back.defvjp(lambda x, mask: (x, mask), lambda mask, g: (flipped(g, mask), None))


def body(module, x, masks, train, *, is_normed):
    x = on_the_way(nn.Dense(WIDTH)(x), masks["activations"][: len(x)])
    if is_normed:
        x = nn.BatchNorm(use_running_average=not train)(x)
    kernel = module.param("kernel", nn.initializers.lecun_normal(), KERNEL)
    return jnp.tanh(x) @ on_the_way_back(kernel, masks["gradients"])


def loss_fn(model, batch, train, constants):
    logits = model(batch["x"], constants, train)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


SHAPES = {"activations": (ROWS, WIDTH), "gradients": KERNEL}
CLEAN = {kind: np.zeros(shape, np.uint32) for kind, shape in SHAPES.items()}


def wrapped(*, is_normed, num_devices=NUM_DEVICES, **options):
    model = Of(lambda *given: body(*given, is_normed=is_normed))
    return jddp.DataParallel(model, optax.adam(1e-2), loss_fn, mesh=num_devices, **options)


class Faults:
    """One `DataParallel`, and steps of it with a bit flipped on one device."""

    def __init__(self, monkeypatch, **options):
        self.ddp, self.is_normed = wrapped(**options), options["is_normed"]
        self.batch = make_batch(ROWS * self.ddp.mesh.size)
        self.clean = jax.device_put(CLEAN, replicated(self.ddp.mesh))
        self.state = self.ddp.init(0, self.batch, constants=self.clean)
        turned = replay.turned

        def turned_with_fault(tree, mesh, other, turns):
            if len(tree) == 2:  # not results on their way back
                tree = tree[0], tree[1]._replace(constants=self.masks_of(turns))
            return turned(tree, mesh, other, turns)

        monkeypatch.setattr(replay, "turned", turned_with_fault)

    def step(self, kind, device, place, bit, only=None, add_noise=lambda masks: masks):
        """Takes a step with the fault; returns the device and the array that are named, or None."""
        state, masks = copied(self.state), self.clean
        if kind == "parameters":
            kernel = bent(state.params["kernel"], device, place, 1 << bit)
            state = state.replace(params={**state.params, "kernel": kernel})
        elif kind is not None:
            masks = masks | {kind: bent(masks[kind], device, place, 1 << bit)}
        self.masks_of = lambda turns: add_noise(masks if only in (None, turns) else self.clean)
        try:
            self.ddp.step(state, self.batch, self.clean, make=ReplayedStep)
        except ReplicaMismatchError as error:
            leaf = re.search(r"first array that differs is (.*?)\. ", f"{error}")[1]
            return [int(x) for x in re.findall(r"(\d+) \(process", f"{error}")], leaf
        return None


@pytest.mark.parametrize("number", [10, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_normed, strategy", [(False, "zero1"), (True, "ddp")])
def test_one_flipped_bit_is_named(monkeypatch, is_normed, strategy, number):
    faults = Faults(monkeypatch, is_normed=is_normed, strategy=strategy)
    rng, leaves = np.random.default_rng(number), {"parameters": "params/kernel"}
    leaves["activations"] = "sent/0000 jvp(loss)/Of/model/Batch" if is_normed else "gradients/Dense"
    leaves["gradients"] = "gradients/kernel"
    for i in range(number):
        kind = ("gradients", "activations", "parameters")[i % 3]
        # A parameter stays wrong; other faults pass, or are there whenever the device computes.
        only = None if kind == "parameters" else (None, 0, 1)[i // 3 % 3]
        # Rounding may remove a change of an activation's last bits: no gradient is wrong then.
        lowest = 12 if kind == "activations" else 0
        device, place, bit = map(int, rng.integers((0, 0, lowest), (NUM_DEVICES, 32, 32)))
        devices, leaf = faults.step(kind, device, place, bit, only)
        assert devices == [device], (kind, place, bit, only, leaf)
        assert leaf.startswith(leaves[kind]), (kind, place, bit, only, leaf)


def test_devices_that_compute_other_bits_each_time_may_differ_by_so_much(monkeypatch, caplog):
    monkeypatch.setattr(replay, "may_be_noisy", lambda hardware: hardware == "cpu")
    faults, rng = Faults(monkeypatch, is_normed=True), np.random.default_rng(0)

    def add_noise(masks):
        bits = rng.integers(8, size=(ROWS, WIDTH), dtype=np.uint32)
        bits = jax.device_put(bits, replicated(faults.ddp.mesh))
        return masks | {"activations": masks["activations"] ^ bits}

    for _ in range(50):
        assert faults.step(None, 0, 0, 0, add_noise=add_noise) is None
    assert "a GPU computes other bits" in caplog.text
    for kind, device in (("gradients", 2), ("activations", 1)):
        assert faults.step(kind, device, 3, 27, add_noise=add_noise)[0] == [device]


RIGHT, WRONG, OTHER = 1, 2, 3


@pytest.mark.parametrize(
    "first, second, third, devices",
    [
        ([RIGHT, RIGHT, WRONG], [RIGHT, WRONG, RIGHT], [WRONG, RIGHT, RIGHT], [2]),
        ([WRONG, RIGHT, RIGHT], [OTHER, RIGHT, RIGHT], [RIGHT] * 3, [0, 1, 2]),
        ([RIGHT, WRONG], [WRONG, RIGHT], [RIGHT, WRONG], [0, 1]),  # each time on two devices
    ],
)
def test_the_devices_that_may_be_wrong_are_what_three_computations_tell(
    first, second, third, devices
):
    digests = np.array([[[RIGHT, x] for x in column] for column in (first, second, third)])
    assert replay.suspects_of(digests) == (1, devices)


def take_steps(ddp, num_steps, make=ReplayedStep):
    batches = [make_batch(ROWS * ddp.mesh.size, seed=i) for i in range(min(num_steps, 20))]
    state = ddp.init(0, batches[0], constants=CLEAN)
    for i in range(num_steps):
        state, metrics = ddp.step(state, batches[i % len(batches)], CLEAN, make=make)
    return state, metrics


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "zero1", "accumulate_steps": 2},
        {"reduction": jddp.Reduction(overlap=True), "ema_decay": 0.9, "max_grad_norm": 1.0},
        {"batch_norm": "local", "skip_nonfinite": True},
    ],
    ids=str,
)
def test_a_replayed_step_equals_the_step(options):
    want = take_steps(wrapped(is_normed=True, **options), 3, make_step)
    assert_same(take_steps(wrapped(is_normed=True, **options), 3), want)


@pytest.mark.parametrize("num_steps", [200, pytest.param(100_000, marks=pytest.mark.long)])
def test_equal_devices_raise_no_false_alarm(num_steps):
    take_steps(wrapped(is_normed=True), num_steps)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"num_devices": 1}, "one device"),
        ({"strategy": "fsdp"}, "strategy='fsdp'"),
        ({"strategy": jddp.LogicalReplicas(8)}, "logical replicas"),
    ],
    ids=str,
)
def test_a_step_that_no_other_device_could_compute_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        take_steps(wrapped(is_normed=False, **options), 1)


def test_sums_in_a_loop_are_refused_where_they_depend_on_the_order_of_the_devices(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match="inside a loop"):
        take_steps(wrapped(is_normed=True, accumulate_steps=2), 1)
