"""Layers made by one `vmap` and run by one `scan`, each with its own keys for dropout. NNX."""

import functools

import numpy as np
import optax
from flax import nnx

NUM_CLASSES, SIZE, NUM_LAYERS = 4, 6, 3


class Layer(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.gelu(self.linear(self.norm(x))))


class Stack(nnx.Module):
    """Parameters and keys have a leading dim of layers."""

    def __init__(self, width, *, rngs):
        @nnx.split_rngs(splits=NUM_LAYERS)
        @functools.partial(nnx.vmap, in_axes=0, out_axes=0)
        def make_layers(rngs):
            return Layer(width, rngs=rngs)

        self.first = nnx.Linear(SIZE, width, rngs=rngs)
        self.layers = make_layers(rngs)
        self.last = nnx.Linear(width, NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        @functools.partial(nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.last(run(self.first(x), self.layers))


def make_model():
    return Stack(8, rngs=nnx.Rngs(0))


def loss_fn(model, batch, train):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, SIZE)).astype(np.float32)
    return {"x": x, "label": np.abs(x[:, :NUM_CLASSES]).argmax(-1).astype(np.int32)}
