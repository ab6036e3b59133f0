"""An autoencoder whose decoder is its encoder, transposed; its loss is one number. NNX."""

import numpy as np
from flax import nnx

SIZE = 12


class Encoder(nnx.Module):
    def __init__(self, code, *, rngs):
        self.code = code
        self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), (1, code.out_features)))

    def __call__(self, x):
        return nnx.tanh(self.code(x) + self.bias)


class Decoder(nnx.Module):
    def __init__(self, code, *, rngs):
        self.code = code
        self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), (1, code.in_features)))

    def __call__(self, z):
        return z @ self.code.kernel.T + self.bias


class Autoencoder(nnx.Module):
    """Three owners of one linear layer; another is run twice."""

    def __init__(self, width, *, rngs):
        self.code = nnx.Linear(SIZE, width, use_bias=False, rngs=rngs)
        self.encoder = Encoder(self.code, rngs=rngs)
        self.decoder = Decoder(self.code, rngs=rngs)
        self.between = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        z = self.encoder(x)
        for _ in range(2):
            z = z + nnx.tanh(self.between(z))
        return self.decoder(z)


def make_model():
    return Autoencoder(5, rngs=nnx.Rngs(0))


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["x"]) ** 2).mean()


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(0).normal(size=(4, SIZE))
    return {"x": (0.5 * rng.normal(size=(rows, 4)) @ mixing).astype(np.float32)}
