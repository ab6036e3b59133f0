"""A custom communication hook with state: sign compression with error feedback, one bit a number.

    python examples/send_signs.py

A replica sends the signs of its gradient and, for each leaf, the mean of their absolute values. It
keeps the compression error, and adds it to the next gradient (EF-SignSGD: Karimireddy et al., ICML
2019, https://arxiv.org/abs/1901.09847). In a config the hook is
`ddp.reduction.hook.target=send_signs:send_signs`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.flatten_util import ravel_pytree

import jddp
from jddp.inspection.hlo import collectives, read_program


def send_signs():
    """Returns the hook; its state is a vector for each bucket, separate on each replica."""

    def init(plan):
        return [jnp.zeros(bucket.size) for bucket in plan.buckets]

    def reduce(bucket, errors, axis):
        gradients, unravel = ravel_pytree(bucket.leaves)
        ends = np.cumsum([x.size for x in bucket.leaves])[:-1]
        # As gradients of the mean loss, whatever number of rows they are of.
        wanted = gradients.astype(jnp.float32) * bucket.scale + errors[bucket.index]

        def decode(bits, sizes):
            signs = 2 * jnp.unpackbits(bits, count=len(wanted)).astype(jnp.float32) - 1
            return jnp.concatenate(
                [x * y for x, y in zip(jnp.split(signs, ends), sizes, strict=True)]
            )

        pieces = jnp.split(jnp.abs(wanted), ends)
        own = jnp.packbits(wanted > 0), jnp.stack([piece.mean() for piece in pieces])
        # Bits cannot be summed: each replica gets those of all, and takes the mean itself.
        mean = jax.vmap(decode)(*lax.all_gather(own, axis)).mean(0)
        errors = list(errors)
        errors[bucket.index] = wanted - decode(*own)
        return bucket.with_leaves(unravel((mean / bucket.scale).astype(gradients.dtype))), errors

    # On another number of replicas each begins with the mean of all errors.
    return jddp.CommHook(init, reduce, on_resize="mean")


def loss_fn(model, batch):
    """Squared errors (b,)."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)


def main(num_steps=200):
    """Trains by the mean and by signs; returns the last loss of each, and the bytes of a step."""
    rng, ends = np.random.default_rng(0), {}
    x = rng.standard_normal((512, 16), dtype=np.float32)
    batch = {"x": x, "y": np.sin(x)}
    for name, hook in {"mean": None, "signs": send_signs()}.items():
        model = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(16)])
        ddp = jddp.DataParallel(
            model, optax.adam(1e-3), loss_fn, reduction=jddp.Reduction(hook=hook)
        )
        state = ddp.init(seed=0, batch=batch)
        for _ in range(num_steps):
            state, metrics = ddp.step(state, batch)
        program = read_program(ddp.steps.lower(batch).as_text("hlo"))
        ends[name] = float(metrics["loss"]), sum(found.bytes for found in collectives(program))
        print(f"{name}: loss {ends[name][0]:.4f}, the collectives hold {ends[name][1]:,} bytes")
    return ends


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
