"""A variational autoencoder whose noise comes from a stream of its own name. Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

SIZE = 12


class VAE(nn.Module):
    width: int = 16
    num_latents: int = 3

    @nn.compact
    def __call__(self, x, train):
        x = nn.tanh(nn.Dense(self.width)(x))
        mean = nn.Dense(self.num_latents, name="mean")(x)
        log_variance = nn.Dense(self.num_latents, name="log_variance")(x)
        z = mean
        if train:
            noise = jax.random.normal(self.make_rng("noise"), mean.shape)
            z = mean + jnp.exp(0.5 * log_variance) * noise
        return nn.Dense(SIZE)(nn.tanh(nn.Dense(self.width)(z))), mean, log_variance


def loss_fn(model, batch, train):
    logits, mean, log_variance = model(batch["x"], train)
    reconstruction = optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(-1)
    divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(-1)
    return reconstruction + divergence, {"divergence": divergence}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, 3)) @ np.random.default_rng(0).normal(size=(3, SIZE))
    return {"x": (hidden > 0).astype(np.float32)}
