"""A tagger of words by an LSTM in both directions, over sentences of many lengths. Linen."""

import numpy as np
import optax
from flax import linen as nn

NUM_WORDS, NUM_TAGS, LENGTH = 20, 5, 6


class Tagger(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, words, lengths):
        x = nn.Embed(NUM_WORDS, self.width)(words)
        forward = nn.RNN(nn.OptimizedLSTMCell(self.width))
        backward = nn.RNN(nn.OptimizedLSTMCell(self.width))
        x = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
        return nn.Dense(NUM_TAGS)(x)


def loss_fn(model, batch, train):
    logits = model(batch["words"], batch["mask"].sum(-1))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tags"])
    return losses, {"accuracy": logits.argmax(-1) == batch["tags"]}


def make_batch(rows, seed):
    rng = np.random.default_rng(seed)
    words = rng.integers(NUM_WORDS, size=(rows, LENGTH), dtype=np.int32)
    lengths = rng.integers(1, LENGTH + 1, size=rows)
    tags = (words + np.roll(words, 1, axis=1)) % NUM_TAGS
    return {"words": words, "tags": tags, "mask": np.arange(LENGTH) < lengths[:, None]}
