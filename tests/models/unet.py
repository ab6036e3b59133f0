"""A U-Net of two levels, with batch norm: a class for each pixel. Linen."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

NUM_CLASSES, SIZE = 3, 8


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x


class UNet(nn.Module):
    """Halves the image twice, doubles it twice, and sees on the way up what it saw before."""

    width: int = 4
    num_levels: int = 2

    @nn.compact
    def __call__(self, x, train):
        skips = []
        for level in range(self.num_levels):
            skips.append(Block(self.width * 2**level)(x, train))
            x = nn.max_pool(skips[-1], (2, 2), (2, 2))
        x = Block(self.width * 2**self.num_levels)(x, train)
        for level in reversed(range(self.num_levels)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = jnp.concatenate([x, skips[level]], axis=-1)
            x = Block(self.width * 2**level)(x, train)
        return nn.Conv(NUM_CLASSES, (1, 1))(x)


def loss_fn(model, batch, train):
    logits = model(batch["image"], train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["classes"])
    return losses, {"accuracy": logits.argmax(-1) == batch["classes"]}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(rows, SIZE, SIZE, 1)).astype(np.float32)
    classes = np.digitize(image[..., 0] + np.roll(image[..., 0], 1, axis=2), [-0.6, 0.6])
    return {"image": image, "classes": classes.astype(np.int32)}
