"""A ResNet with batch norm and dropout. NNX."""

import numpy as np
import optax
from flax import nnx

NUM_CLASSES, SIZE = 4, 8


class Block(nnx.Module):
    def __init__(self, num_in, num_out, *, strides, rngs):
        self.first = nnx.Conv(num_in, num_out, (3, 3), strides, use_bias=False, rngs=rngs)
        self.first_norm = nnx.BatchNorm(num_out, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(num_out, num_out, (3, 3), use_bias=False, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.second_norm = nnx.BatchNorm(num_out, momentum=0.9, scale_init=zeros, rngs=rngs)
        self.shortcut = nnx.Conv(num_in, num_out, (1, 1), strides, use_bias=False, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return nnx.relu(y + self.shortcut(x))


class ResNet(nnx.Module):
    """Two blocks, the second at half the size."""

    def __init__(self, width, *, rngs):
        self.stem = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        first = Block(width, width, strides=1, rngs=rngs)
        self.blocks = nnx.List([first, Block(width, 2 * width, strides=2, rngs=rngs)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(2 * width, NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((1, 2))))


def make_model():
    return ResNet(4, rngs=nnx.Rngs(0))


def loss_fn(model, batch, train):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(rows, SIZE, SIZE, 3)).astype(np.float32)
    return {"image": image, "label": rng.integers(NUM_CLASSES, size=rows, dtype=np.int32)}
