"""An encoder-decoder that reverses sequences, and decodes greedily from a `cache`. Linen.

As in Flax's own examples the model that predicts is the one that trains, cloned with
`decode=True`: it takes one token at a time, and keeps keys and values in a collection `cache`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

NUM_TOKENS, LENGTH = 8, 4


class Attention(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x, memory=None, mask=None):
        y = nn.LayerNorm()(x)
        attend = nn.MultiHeadDotProductAttention(num_heads=2, decode=self.decode)
        return x + attend(y, y if memory is None else memory, mask=mask)


class Seq2Seq(nn.Module):
    """One layer reads the source, one writes the target."""

    width: int = 8
    decode: bool = False

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(NUM_TOKENS, self.width)
        places = self.param("places", nn.initializers.normal(), (1, LENGTH, self.width))
        memory = nn.LayerNorm()(Attention()(embed(source) + places))
        if self.decode:
            is_made = self.has_variable("cache", "index")
            index = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
            x = embed(target)
            if is_made:
                x = x + jax.lax.dynamic_slice_in_dim(places, index.value, 1, axis=1)
                index.value = index.value + 1
            mask = None
        else:
            # Each place is given the target before it; the first, token 0.
            x = embed(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]) + places
            mask = nn.make_causal_mask(target)
        x = Attention(decode=self.decode)(x, mask=mask)
        x = Attention()(x, memory)
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def predict(model, params, source):
    """The likeliest token at each place, given those that were chosen before it."""
    decoder = model.clone(decode=True, parent=None)
    cache = decoder.init(jax.random.key(0), source, jnp.zeros_like(source))["cache"]

    def next_token(carry, _):
        cache, token = carry
        variables = {"params": params, "cache": cache}
        logits, written = decoder.apply(variables, source, token, mutable=["cache"])
        token = logits.argmax(-1).astype(token.dtype)
        return (written["cache"], token), token[:, 0]

    _, tokens = jax.lax.scan(next_token, (cache, source[:, :1] * 0), length=LENGTH)
    return tokens.T


def loss_fn(model, batch, train):
    logits = model(batch["source"], batch["target"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    if train:
        return losses
    tokens = predict(model, model.variables["params"], batch["source"])
    return losses, {"exact": (tokens == batch["target"]).all(-1)}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    source = rng.integers(1, NUM_TOKENS, size=(rows, LENGTH), dtype=np.int32)
    return {"source": source, "target": source[:, ::-1].copy()}
