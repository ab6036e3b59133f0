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


CLEAN = {
    "activations": np.zeros((ROWS, WIDTH), np.uint32),
    "gradients": np.zeros(KERNEL, np.uint32),
}


def wrapped(*, is_normed, num_devices=NUM_DEVICES, **options):
    model = Of(lambda *given: body(*given, is_normed=is_normed))
    return jddp.DataParallel(model, optax.adam(1e-2), loss_fn, mesh=num_devices, **options)


class Faults:
    """One `DataParallel`, and steps of it with a bit flipped on one device."""

    def __init__(self, monkeypatch, **options):
        self.ddp, self.is_normed = wrapped(**options), options["is_normed"]
        mesh = self.ddp.mesh
        self.batch = make_batch(ROWS * mesh.size)
        self.clean = jax.tree.map(lambda x: jax.device_put(x, replicated(mesh)), CLEAN)
        self.state = self.ddp.init(0, self.batch, constants=self.clean)
        self.only = None  # the one computation that the fault is in; None for all
        turned = replay.turned

        def turned_with_fault(tree, mesh, other, turns):
            state, inputs = tree
            if self.only not in (None, turns):
                inputs = inputs._replace(constants=self.clean)
            return turned((state, inputs), mesh, other, turns)

        monkeypatch.setattr(replay, "turned", turned_with_fault)

    def step(self, kind, device, place, bit):
        """Takes a step; returns the device and the array that are named, or None."""
        state, masks = copied(self.state), dict(self.clean)
        if kind == "parameters":
            kernel = bent(state.params["kernel"], device, place, 1 << bit)
            state = state.replace(params={**state.params, "kernel": kernel})
        else:
            masks[kind] = bent(masks[kind], device, place, 1 << bit)
        try:
            self.ddp.step(state, self.batch, masks, make=ReplayedStep)
        except ReplicaMismatchError as error:
            leaf = re.search(r"first array that differs is (.*?)\. ", f"{error}")[1]
            return [int(x) for x in re.findall(r"(\d+) \(process", f"{error}")], leaf
        return None


def check(faults, number, seed):
    """Flips bits at random; each is named."""
    rng, sync = np.random.default_rng(seed), faults.is_normed
    leaves = {"parameters": "params/kernel", "gradients": "gradients/kernel"}
    leaves["activations"] = "sent/0000 jvp(loss)/Of/model/Batch" if sync else "gradients/Dense_0/b"
    for i in range(number):
        kind = ("gradients", "activations", "parameters")[i % 3]
        # A parameter stays wrong; other faults pass, or are there whenever the device computes.
        faults.only = None if kind == "parameters" else (None, 0, 1)[i // 3 % 3]
        device, place, bit = map(int, rng.integers((0, 0, 12), (NUM_DEVICES, 32, 31)))
        devices, leaf = faults.step(kind, device, place, bit)
        assert devices == [device], (kind, place, bit, faults.only, leaf)
        assert leaf.startswith(leaves[kind]), (kind, place, bit, faults.only, leaf)


@pytest.mark.parametrize("number", [10, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_normed, strategy", [(False, "zero1"), (True, "ddp")])
def test_one_flipped_bit_is_named_with_its_device_and_its_first_array(
    monkeypatch, is_normed, strategy, number
):
    check(Faults(monkeypatch, is_normed=is_normed, strategy=strategy), number, seed=number)


RIGHT, WRONG, OTHER = 1, 2, 3


@pytest.mark.parametrize(
    "first, second, third, devices",
    [
        ([RIGHT, WRONG, RIGHT], [RIGHT] * 3, [RIGHT] * 3, [1]),
        ([RIGHT] * 3, [RIGHT, WRONG, RIGHT], [RIGHT] * 3, [2]),
        ([RIGHT, RIGHT, WRONG], [RIGHT, WRONG, RIGHT], [WRONG, RIGHT, RIGHT], [2]),
        ([WRONG, RIGHT, RIGHT], [OTHER, RIGHT, RIGHT], [RIGHT] * 3, [0, 1, 2]),
        ([RIGHT, WRONG], [RIGHT, RIGHT], [RIGHT, RIGHT], [1]),
        ([RIGHT, WRONG], [WRONG, RIGHT], [RIGHT, WRONG], [0, 1]),  # each time on two devices
    ],
)
def test_the_devices_that_may_be_wrong_are_what_three_computations_tell(
    first, second, third, devices
):
    digests = [np.array([[RIGHT, x] for x in column]) for column in (first, second, third)]
    assert replay.suspects_of(digests) == (1, devices)


def take_steps(ddp, num_steps, make=ReplayedStep):
    rng, constants = np.random.default_rng(0), CLEAN
    size = ROWS * ddp.mesh.size
    batches = [make_batch(size, seed=int(x)) for x in rng.integers(0, 99, min(num_steps, 20))]
    state = ddp.init(0, batches[0], constants=constants)
    for i in range(num_steps):
        state, metrics = ddp.step(state, batches[i % len(batches)], constants, make=make)
    return state, metrics


OPTIONS = [
    {"strategy": "zero1", "accumulate_steps": 2},
    {"reduction": jddp.Reduction(overlap=True), "ema_decay": 0.9, "max_grad_norm": 1.0},
    {"batch_norm": "local", "skip_nonfinite": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_replayed_step_equals_the_step(options):
    want, got = (
        take_steps(wrapped(is_normed=True, **options), 3, x) for x in (make_step, ReplayedStep)
    )
    assert_same(got, want)


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
