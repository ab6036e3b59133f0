"""A critic that tells real from made images, with spectral norm: it writes `batch_stats`. Linen."""

import numpy as np
from flax import linen as nn

SIZE = 6


class Critic(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train):
        for features in (self.width, 2 * self.width):
            conv = nn.Conv(features, (3, 3), strides=2)
            x = nn.leaky_relu(nn.SpectralNorm(conv)(x, update_stats=train), 0.2)
        x = x.reshape(len(x), -1)
        return nn.SpectralNorm(nn.Dense(1))(x, update_stats=train)[:, 0]


def loss_fn(model, batch, train):
    real, made = model(batch["real"], train), model(batch["made"], train)
    return nn.softplus(-real) + nn.softplus(made), {"gap": real - made}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    real, made = rng.normal(size=(2, rows, SIZE, SIZE, 1)).astype(np.float32)
    return {"real": np.cumsum(real, axis=1), "made": made}
