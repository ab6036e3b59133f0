"""One model in two stages on two devices: a pipeline, and how many bytes it sends.

    python examples/two_stages.py
    python -m jddp.launch --num-processes 2 --devices-per-process 1 examples/two_stages.py

Device 0 has the trunk of a network, and device 1 its head. The trunk's output, the boundary, is
sent to the head by `ppermute`; its gradient comes back by the transpose of `ppermute`, which
autodiff makes. While the head works on one micro-batch, the trunk works on the next (GPipe: Huang
et al., NeurIPS 2019, https://arxiv.org/abs/1811.06965, section 2.3).

The step is your own, without `jddp.DataParallel`, whose mesh has one axis. jddp reads its compiled
program: the last table compares what it sends with data parallelism and fsdp of the same model.
With three devices there are two heads: the boundary is sent from one device to many.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import P, lax
from jax.flatten_util import ravel_pytree

import jddp
from jddp import distributed
from jddp.data import TrainBatches, make_source
from jddp.inspection.hlo import collectives, read_program

AXIS, NUM_MICRO_BATCHES = "stage", 4
IMAGE, BOUNDARY = (28, 28, 1), (7, 7, 16)  # height, width, channels
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Trunk(nn.Module):
    """The first stage."""

    @nn.compact
    def __call__(self, image):
        """Returns boundaries (b, 7, 7, 16) of images (b, 28, 28, 1)."""
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(image))
        return nn.relu(nn.Conv(16, (3, 3), strides=2)(x))


class Head(nn.Module):
    """The second stage."""

    @nn.compact
    def __call__(self, boundary):
        """Returns logits (b, 10) of boundaries (b, 7, 7, 16)."""
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(boundary))
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(len(x), -1))))


def make_stage(module, shape, seed):
    """Returns parameters as one row, and a function of such a row, which may be padded, and x."""
    row, unravel = ravel_pytree(module.init(jax.random.key(seed), jnp.zeros((1, *shape))))
    return row, lambda padded, x: module.apply(unravel(padded[: row.size]), x)


def make_stages(num_heads=1):
    """Returns the stages as functions, and their parameters (stages, longest): a row a device."""
    made = [make_stage(Trunk(), IMAGE, 0)]
    made += [make_stage(Head(), BOUNDARY, seed) for seed in range(1, num_heads + 1)]
    rows, stages = zip(*made, strict=True)
    longest = max(row.size for row in rows)
    padded = np.stack([np.pad(row, (0, longest - row.size)) for row in rows])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: len(stages)]), (AXIS,))
    return stages, jax.device_put(padded, jax.NamedSharding(mesh, P(AXIS)))


def send(boundary):
    """Sends the boundary of device 0 to each other device.

    A `ppermute` takes each source and each target once. So one to many is one `ppermute` for each
    target, from which the others get zeros. Its transpose sends the target's gradient back, and
    device 0 adds them. An `all_gather` would send what all devices have, to all devices.
    """
    targets = range(1, lax.axis_size(AXIS))
    return sum(lax.ppermute(boundary, AXIS, [(0, target)]) for target in targets)


def pipelined_loss(row, trunk, head, parts):
    """Returns a head's mean loss over all micro-batches, which is 0 on the device of the trunk.

    In tick i the trunk computes micro-batch i, and a head micro-batch i - 1. There is one tick more
    than there are micro-batches: the first result of a head and the last of the trunk are dropped.
    (An index out of range is that of the last micro-batch.)
    """

    def on_trunk(received, i):
        return trunk(row, parts["image"][i]), 0.0

    def on_head(received, i):
        return received, cross_entropy(head(row, received), parts["label"][i - 1]).mean()

    def tick(received, i):
        return lax.cond(lax.axis_index(AXIS) == 0, on_trunk, on_head, received, i)

    first, _ = tick(jnp.zeros((parts["image"].shape[1], *BOUNDARY)), 0)
    others = 1 + jnp.arange(NUM_MICRO_BATCHES)
    _, losses = lax.scan(lambda boundary, i: tick(send(boundary), i), first, others)
    return losses.mean()


def make_gradients(stages, mesh):
    """Returns a function of rows and batch: the mean loss of all heads, and the rows' gradients."""
    trunk, head, *more = stages  # More heads differ in their rows alone.

    def of_device(rows, batch):
        parts = jax.tree.map(lambda x: x.reshape(NUM_MICRO_BATCHES, -1, *x.shape[1:]), batch)
        loss, gradient = jax.value_and_grad(pipelined_loss)(rows[0], trunk, head, parts)
        num_heads = 1 + len(more)
        # Summed after autodiff, since the transpose of `psum` would sum gradients too.
        return lax.psum(loss, AXIS) / num_heads, gradient[None] / num_heads

    specs = {"in_specs": (P(AXIS), P()), "out_specs": (P(), P(AXIS)), "check_vma": False}
    return jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))


def train(num_heads, num_steps):
    """Trains with one head or more, and prints the loss."""
    stages, rows = make_stages(num_heads)
    gradients, optimizer = make_gradients(stages, rows.sharding.mesh), optax.adam(2e-3)

    @jax.jit
    def step(rows, moments, batch):
        loss, grads = gradients(rows, batch)
        updates, moments = optimizer.update(grads, moments)
        return optax.apply_updates(rows, updates), moments, loss

    moments, data = optimizer.init(rows), make_source("fashion_mnist").load().train
    # Each process has all rows of a batch: a device computes a part of the network for all of them.
    batches = TrainBatches(data, global_batch_size=64, seed=0, process_index=0, num_processes=1)
    for i in range(1, num_steps + 1):
        rows, moments, loss = step(rows, moments, next(batches))
        if i % 10 == 0:
            print(f"{len(stages)} devices, step {i}: loss {loss:.3f}")


def compare(*batch_sizes):
    """Prints what a step sends in each way; returns it by the size of a batch."""
    (stages, rows), whole, table = make_stages(), nn.Sequential([Trunk(), Head()]), {}
    gradients = make_gradients(stages, rows.sharding.mesh)

    def explained(strategy, batch):
        optimizer, loss_fn = optax.adam(2e-3), lambda m, x: cross_entropy(m(x["image"]), x["label"])
        ddp = jddp.DataParallel(whole, optimizer, loss_fn, mesh=2, strategy=strategy)
        return jddp.explain(ddp, batch)

    print("MB that two devices send to each other in a step\n batch  stages     ddp    fsdp")
    for size in batch_sizes:
        images = jax.ShapeDtypeStruct((size, *IMAGE), np.float32)
        batch = {"image": images, "label": jax.ShapeDtypeStruct((size,), np.int32)}
        program = read_program(gradients.lower(rows, batch).compile().as_text())
        sends = [x for x in collectives(program) if x.op == "collective-permute"]
        table[size] = (
            sum(x.bytes * x.num_runs for x in sends),
            2 * explained("ddp", batch).bytes_per_step,  # A ring of two: all bytes from each.
            # Of the plan: XLA:CPU makes one gather of those of both passes.
            sum((x.num_passes + 1) * x.bytes for x in explained("fsdp", batch).plan.units),
        )
        print(f"{size:6}", *(f"{x / 1e6:7.2f}" for x in table[size]))
    equal = [size * other / table[size][0] for other in table[size][1:]]
    print("Stages send less than ddp up to batches of {:.0f}, than fsdp of {:.0f}.".format(*equal))
    return table


def main(num_steps=20):
    """Trains with one head, with two where there are three devices, and compares what is sent."""
    train(1, num_steps)
    if jax.device_count() > 2:
        train(2, num_steps)
    compare(32, 128, 512)


if __name__ == "__main__":
    identity = distributed.resolve_identity()
    if identity.num_processes == 1:
        jax.config.update("jax_num_cpu_devices", 3)  # Virtual, where there is no GPU.
    distributed.initialize(identity)
    main()
