"""The whole idea of jddp on one page, with nothing but jax, flax and optax.

    python examples/ddp_in_one_page.py

Every device holds a replica of the model and a part of the batch. Once per step the replicas'
gradients are averaged, in a few large all-reduces; then every replica makes the same update, so
parameters are never sent. Eight devices must train like one device with the whole batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "data"


def plan_buckets(tree, bucket_bytes):
    """Groups the leaves' numbers, last to first as the backward pass ends, by dtype and size."""
    buckets, filling, room = [], {}, {}
    for i, leaf in reversed(list(enumerate(jax.tree.leaves(tree)))):
        num_bytes = leaf.size * leaf.dtype.itemsize
        if num_bytes > room.get(leaf.dtype, -1):
            filling[leaf.dtype], room[leaf.dtype] = [], bucket_bytes
            buckets.append(filling[leaf.dtype])
        filling[leaf.dtype].append(i)
        room[leaf.dtype] -= num_bytes
    return buckets


def pmean_buckets(tree, buckets, layout):
    """Averages `tree` over the replicas, one bucket after the other."""
    leaves, treedef = jax.tree.flatten(tree)
    for bucket in buckets:
        averaged = [leaves[i] for i in bucket]
        if layout == "flat":  # One vector, one all-reduce.
            vector, unravel = ravel_pytree(averaged)
            averaged = unravel(lax.pmean(vector, AXIS))
        else:  # The leaves as they are; the compiler fuses them.
            averaged = lax.pmean(averaged, AXIS)
        for i, leaf in zip(bucket, averaged, strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)


def make_step(loss_fn, optimizer, mesh, *, bucket_bytes=25 * 2**20, layout="leaf"):
    """Returns `step(params, opt_state, batch) -> params, opt_state, loss`, the global mean."""

    def replica_step(params, opt_state, batch):
        mask = batch["mask"]  # 1 for examples, 0 for padding.

        def total_loss(params):
            return jnp.sum(loss_fn(params, batch) * mask)

        # Local: this replica's sum over its own examples.
        total, grads = jax.value_and_grad(total_loss)(params)
        # Global: a mean of means would be wrong where replicas hold different numbers of
        # examples, so sums are reduced, and the mean count divides them.
        count = lax.pmean(mask.sum(), AXIS)
        loss = lax.pmean(total, AXIS) / count
        grads = pmean_buckets(grads, plan_buckets(grads, bucket_bytes), layout)
        grads = jax.tree.map(lambda g: g / count, grads)
        # From here on all replicas hold the same numbers and do the same arithmetic.
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # Unchecked: the check would make autodiff sum the gradients before we average them.
    step = jax.shard_map(
        replica_step,
        mesh=mesh,
        in_specs=(P(), P(), P(AXIS)),
        out_specs=P(),
        check_vma=False,
    )
    # XLA for CPUs merges all buckets into one again by default.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    keep_apart = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
    options = keep_apart if on_cpu and layout == "flat" else {}
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=options)


def train(num_devices, num_steps=50):
    """Trains a small MLP on the first `num_devices` devices and returns its parameters."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(1)])
    x = np.random.default_rng(0).standard_normal((64, 4), dtype=np.float32)
    batch = {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True)), "mask": np.ones(64, np.float32)}
    batch["mask"][-5:] = 0  # A partial batch: the last replica has three examples of eight.

    def squared_error(params, batch):
        return ((model.apply(params, batch["x"]) - batch["y"]) ** 2).mean(axis=-1)

    optimizer = optax.sgd(0.1, momentum=0.9)
    params = model.init(jax.random.key(0), x[:1])
    replicated = NamedSharding(mesh, P())
    params, opt_state = jax.device_put((params, optimizer.init(params)), replicated)
    batch = jax.device_put(batch, NamedSharding(mesh, P(AXIS)))
    step = make_step(squared_error, optimizer, mesh)
    for i in range(num_steps):
        params, opt_state, loss = step(params, opt_state, batch)
        if i % 10 == 9:  # Reading it waits for the devices, so do it rarely.
            print(f"{num_devices} devices, step {i + 1}: loss {loss:.6f}")
    return params


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    difference = jax.tree.map(lambda a, b: abs(np.array(a) - b).max(), train(1), train(8))
    print(f"largest difference of a parameter: {max(jax.tree.leaves(difference)):.1e}")
