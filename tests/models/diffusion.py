"""A denoising diffusion model in the plane, sampled from with averaged parameters. NNX."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

NUM_TIMES = 50


class Denoiser(nnx.Module):
    """Says which noise was added, from what came of it and the time."""

    def __init__(self, width, *, rngs):
        self.times = nnx.Embed(NUM_TIMES, width, rngs=rngs)
        self.first = nnx.Linear(2, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x, times):
        x = nnx.silu(self.first(x) + self.times(times))
        return self.last(nnx.silu(self.second(x)))


class Diffusion(nnx.Module):
    """Draws times and noise by itself."""

    def __init__(self, width, *, rngs):
        self.denoiser = Denoiser(width, rngs=rngs)
        betas = jnp.linspace(1e-3, 0.2, NUM_TIMES)
        self.signal = nnx.Variable(jnp.cumprod(1 - betas))
        self.rngs = rngs

    def __call__(self, x):
        times = jax.random.randint(self.rngs.times(), (len(x),), 0, NUM_TIMES)
        noise = jax.random.normal(self.rngs.noise(), x.shape)
        signal = self.signal[...][times][:, None]
        noisy = jnp.sqrt(signal) * x + jnp.sqrt(1 - signal) * noise
        return ((self.denoiser(noisy, times) - noise) ** 2).mean(-1)


def make_model():
    return Diffusion(16, rngs=nnx.Rngs(0, times=1, noise=2))


def loss_fn(model, batch, train):
    return model(batch["x"])


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi, rows)
    x = np.stack([np.cos(angle), np.sin(angle)], -1) + 0.05 * rng.normal(size=(rows, 2))
    return {"x": x.astype(np.float32)}
