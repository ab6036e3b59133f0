"""A two-level all-reduce: within each host first, then between hosts.

    python examples/two_level_all_reduce.py

Links within a host are faster than those between hosts. So a bucket is reduce-scattered within the
host, each device all-reduces its part with the devices of the same number on the other hosts, and
the parts are gathered within the host: 1 / (devices of a host) of the bucket is sent between hosts.
The mean is the same, up to the order of additions.

A mode of reduction is a communication hook: one function of a bucket, one file, and no change in
jddp. Here eight virtual devices stand for two hosts of four.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax

import jddp


def two_level(num_local):
    """A `CommHook` that averages within groups of `num_local` neighbouring devices, then between.

    Args:
      num_local: Devices of a host; in a job `jax.local_device_count()`.
    """

    def mean(x, axis):
        num = lax.axis_size(axis)
        hosts = np.arange(num).reshape(-1, num_local)  # a row for each host
        within, between = hosts.tolist(), hosts.T.tolist()
        flat = jnp.pad(x.ravel(), (0, -x.size % num_local))
        part = lax.psum_scatter(flat, axis, axis_index_groups=within, tiled=True)
        part = lax.psum(part, axis, axis_index_groups=between) / num
        flat = lax.all_gather(part, axis, axis_index_groups=within, tiled=True)
        return flat[: x.size].reshape(x.shape)

    def reduce(bucket, state, axis):
        return jax.tree.map(functools.partial(mean, axis=axis), bucket), state

    return jddp.CommHook(lambda plan: (), reduce)


def loss_fn(model, batch):
    """The squared error of each row."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def main(num_steps=50, num_local=4):
    """Trains with both reductions on the same rows; returns the parameters of both."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8), dtype=np.float32)
    batch = {"x": x, "y": np.tanh(x[:, :3])}
    ends = []
    for hook in (None, two_level(num_local)):
        model = nn.Sequential([nn.Dense(33), nn.tanh, nn.Dense(3)])
        ddp = jddp.DataParallel(
            model, optax.adam(1e-2), loss_fn, reduction=jddp.Reduction(layout="flat", hook=hook)
        )
        state = ddp.init(seed=0, batch=batch)
        for _ in range(num_steps):
            state, metrics = ddp.step(state, batch)
        print(f"loss {metrics['loss']:.5f} with", "two levels" if hook else "one all-reduce")
        ends.append(jax.device_get(state.params))
    print(jddp.explain(ddp, batch))
    return ends


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
