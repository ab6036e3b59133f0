"""Tiny models, losses and batches that tests share; seconds to compile, nothing to learn."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jddp

NUM_CLASSES = 4


class Of(nn.Module):
    """A model whose body is a function of the module and its inputs."""

    body: Callable

    @nn.compact
    def __call__(self, *inputs, **options):
        return self.body(self, *inputs, **options)


class Tiny(nn.Module):
    dtype: jnp.dtype = jnp.float32
    dropout_rate: float = 0.0


class MLP(Tiny):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(16, dtype=self.dtype)(x))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(NUM_CLASSES, dtype=self.dtype)(x)


class ConvNet(Tiny):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3), use_bias=False, dtype=self.dtype)(x.reshape(-1, 4, 4, 1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(nn.relu(x))
        return nn.Dense(NUM_CLASSES, dtype=self.dtype)(x.mean((1, 2)))


class Recurrent(Tiny):
    @nn.compact
    def __call__(self, x, train):
        x = nn.RNN(nn.GRUCell(8, dtype=self.dtype))(x.reshape(-1, 4, 4))[:, -1]
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(NUM_CLASSES, dtype=self.dtype)(x)


class Block(nn.Module):
    train: bool
    dtype: jnp.dtype
    dropout_rate: float

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        query, key, value = jnp.split(nn.Dense(24, dtype=self.dtype)(y), 3, axis=-1)
        y = nn.softmax(query @ key.mT) @ value
        y = nn.Dropout(self.dropout_rate, deterministic=not self.train)(y)
        return x + nn.Dense(8, dtype=self.dtype)(y), None


class Transformer(Tiny):
    """Two layers in one scan."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, dtype=self.dtype)(x.reshape(-1, 4, 4))
        layers = nn.scan(
            Block,
            length=2,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
        )
        x, _ = layers(train, self.dtype, self.dropout_rate)(x, None)
        return nn.Dense(NUM_CLASSES, dtype=self.dtype)(x.mean(1))


class NnxConvNet(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32, dropout_rate=0.0):
        self.conv = nnx.Conv(1, 4, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.dense = nnx.Linear(4, NUM_CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, x, train=None):
        x = self.norm(self.conv(x.reshape(-1, 4, 4, 1)))
        return self.dense(self.dropout(nnx.relu(x)).mean((1, 2)))


MODELS = {
    "mlp": MLP,
    "conv": ConvNet,
    "recurrent": Recurrent,
    "transformer": Transformer,
    "nnx": lambda **kwargs: NnxConvNet(nnx.Rngs(0), **kwargs),
}


def loss_fn(model, batch, train):
    logits = model(batch["x"], train=train).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses, {"accuracy": logits.argmax(-1) == batch["y"]}


def wrapped(model=None, optimizer=None, loss=loss_fn, *, mesh=2, **options):
    """The smallest `DataParallel`, or one of these parts."""
    optimizer = optimizer or optax.sgd(0.1)
    return jddp.DataParallel(model or MLP(), optimizer, loss, mesh=mesh, **options)


def take_steps(ddp, batches, state=None):
    """The state behind a step on each of the batches, and the metrics of the last."""
    state = ddp.init(0, batches[0]) if state is None else state
    for batch in batches:
        state, metrics = ddp.step(state, batch)
    return state, metrics


def make_batch(rows=16, *, seed=0, masked=False):
    rng = np.random.default_rng(seed)
    batch = {
        "x": rng.normal(size=(rows, 16)).astype(np.float32),
        "y": rng.integers(0, NUM_CLASSES, rows).astype(np.int32),
    }
    if masked:
        # Ragged: the first replicas are full, the last ones empty.
        batch["mask"] = np.arange(rows) < rows - 5
    return batch


def make_batches(num=6, rows=8):
    """A list of different batches, as a user may have it."""
    return [make_batch(rows, seed=seed) for seed in range(num)]
