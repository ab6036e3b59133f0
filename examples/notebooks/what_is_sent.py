# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # See what a step sends
#
# The cost of data parallelism is the data sent between devices. jddp shows it twice: `ddp.plan`
# lists the *buckets* in which gradients are to be sent, and `jddp.explain` lists the collectives of
# the compiled step. Neither needs a network: this notebook uses eight virtual devices of one CPU.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from jax import lax

import jddp

jax.config.update("jax_num_cpu_devices", 8)  # before the first use of a device


class Net(nn.Module):
    """A network of 90,000 parameters."""

    @nn.compact
    def __call__(self, x):
        """Returns numbers (b, 16) for x (b, 64)."""
        for width in (256, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(16)(x)


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def make_batch(step):
    x = np.random.default_rng(step).normal(size=(256, 64)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :16] + x[:, 16:32])}


batch = make_batch(0)


def make(**options):
    return jddp.DataParallel(Net(), optax.adam(1e-3), loss_fn, **options)


# %% [markdown]
# ## The plan
#
# The backward pass finishes the last layer first, so the buckets are filled from the last layer.
# Gradients of a bucket are sent together: one large message costs less than many small ones.
# `bucket_mb` of `jddp.Reduction` is the largest size of a bucket; by default, as in PyTorch, 1 MiB
# for the first and 25 MiB for the others.

# %%
ddp = make(reduction=jddp.Reduction(bucket_mb=(0.1, 0.2)))
state = ddp.init(seed=0, batch=batch)
ddp.plan

# %% [markdown]
# ## The compiled program
#
# `explain` compiles the step and reads the collectives out of it, after every optimization of XLA.
# A ring all-reduce of N devices moves 2 (N - 1) / N of its bytes into and out of each device. On
# CPUs XLA makes one all-reduce of all buckets; on several GPUs a bucket is sent while the backward
# pass still runs.

# %%
jddp.explain(ddp, batch)


# %% [markdown]
# ## Fewer bytes
#
# Two kinds of `reduction` send fewer bytes: a dtype for the wire, and *communication hooks*, which
# reduce a bucket in place of the mean. `bfloat16` takes half the bytes of float32. PowerSGD sends
# two thin factors of each matrix. A hook of your own is two functions: the hook below sends int8
# numbers with one scale for all replicas, and keeps its rounding error for the next step (error
# feedback).


# %%
def eight_bits():
    """A hook that sends one byte per number, with error feedback."""

    def init(plan):
        return [jnp.zeros(bucket.size) for bucket in plan.buckets]

    def reduce(bucket, errors, axis):
        leaves = bucket.leaves
        flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
        wanted = flat * bucket.scale + errors[bucket.index]
        scale = lax.pmax(jnp.abs(wanted).max(), axis) / 127
        sent = jnp.round(wanted / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
        # Sums of int8 would overflow: each replica gets the bytes of all replicas.
        mean = lax.all_gather(sent, axis).mean(0, dtype=jnp.float32) * scale / bucket.scale
        errors = list(errors)
        errors[bucket.index] = wanted - sent * scale
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = zip(jnp.split(mean, ends), leaves, strict=True)
        reduced = [part.reshape(leaf.shape) for part, leaf in parts]
        return bucket.with_leaves(reduced), errors

    return jddp.CommHook(init, reduce, on_resize="mean")


MODES = {
    "float32": {},
    "bfloat16": {"reduction": "bfloat16"},
    "int8, a hook": {"reduction": jddp.Reduction(hook=eight_bits())},
    "PowerSGD, rank 2": {"reduction": jddp.Reduction(hook=jddp.powersgd(rank=2, start_step=0))},
}

losses = {}
for name, options in MODES.items():
    ddp = make(**options)
    state, losses[name] = ddp.init(seed=0, batch=batch), []
    for step in range(100):
        state, metrics = ddp.step(state, make_batch(step))
        losses[name].append(metrics["loss"])
    print(f"{name:17} loss {losses[name][-1]:.4f}")

# %% [markdown]
# The last mode was PowerSGD: its collectives send thin factors, and the biases.

# %%
jddp.explain(ddp, batch)

# %% [markdown]
# ## What it costs in accuracy
#
# Fewer bytes are not free. Here is the loss of each mode over its steps; try it with your own
# model.

# %%
figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
for name, values in losses.items():
    panel.plot(np.asarray(values), label=name)
panel.set(xlabel="step", ylabel="loss", yscale="log")
panel.legend()
plt.show()

# %% [markdown]
# ## Next steps
#
# [The life of a gradient](../../docs/life_of_a_gradient.md) follows one gradient through the code,
# [Modes of a step](../../docs/modes.md) describes every mode, and [the
# measurements](../../benchmarks/README.md) show their costs.
