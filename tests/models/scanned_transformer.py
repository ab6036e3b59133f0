"""A language model whose layers are one scan over a rematerialised block, with dropout. Linen."""

import jax
import numpy as np
import optax
from flax import linen as nn

NUM_TOKENS, LENGTH = 11, 6


class Block(nn.Module):
    train: bool
    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, x, mask):
        drop = nn.Dropout(self.dropout_rate, deterministic=not self.train)
        y = nn.LayerNorm()(x)
        x = x + drop(nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=mask))
        y = nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(x.shape[-1])(y)), None


class Transformer(nn.Module):
    width: int = 8
    num_layers: int = 3

    @nn.compact
    def __call__(self, tokens, train):
        embed = nn.Embed(NUM_TOKENS, self.width)
        places = self.param("places", nn.initializers.normal(0.02), (1, LENGTH, self.width))
        block = nn.remat(Block, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.num_layers,
        )
        x, _ = layers(train, name="layers")(embed(tokens) + places, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


def loss_fn(model, batch, train):
    logits = model(batch["tokens"][:, :-1], train)
    targets = batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses, {"accuracy": logits.argmax(-1) == targets}


def make_batch(rows, seed):
    first, by = np.random.default_rng(seed).integers(NUM_TOKENS, size=(2, rows, 1), dtype=np.int32)
    return {"tokens": (first + by * np.arange(LENGTH + 1, dtype=np.int32)) % NUM_TOKENS}
