"""The module of a user: data, models, losses, an optimizer, a hook and a sink of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.lax import pmean

from jddp import CommHook, Metric

raise_on_import = False


class Line(nn.Module):
    width: int = 1

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(self.width)(x)


class LineNnx(nnx.Module):
    def __init__(self, width=1, *, rngs):
        self.layers = nnx.List([nnx.Linear(2, width, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.layers[0](x))


def points(slope=2.0, num_examples=20, num_broken_rows=0):
    x = np.linspace(-1, 1, 2 * num_examples, dtype=np.float32).reshape(-1, 2)
    both = {"x": x, "y": slope * x[:, :1]}
    both["y"][:num_broken_rows] = np.nan
    return both, {name: array[:7] for name, array in both.items()}


def points_of_each_process():
    both, test = points()
    return both | {"x": both["x"] + jax.process_index()}, test


def make():
    return Line()


def absolute_error(model, batch, train, power=1):
    y = model(batch["x"], train=train) if hasattr(model, "scope") else model(batch["x"])
    error = abs(y - batch["y"])[:, 0] ** power
    return error, {"close": error < 0.5}


def table(model, batch, train):
    losses, _ = absolute_error(model, batch, train)
    confusion = Metric(jnp.ones((len(losses), 2, 2), int), lambda total, count: total)
    recall = Metric(losses, lambda total, count: np.array([1.0, np.nan]))
    return losses, {"confusion": confusion, "recall": recall}


def within(model, batch, train, bound=0.5):
    error, _ = absolute_error(model, batch, train)
    return error, {"within": error < bound}


def greedy(model, batch, train, per_row=1):
    error, metrics = absolute_error(model, batch, train)
    noise = jnp.sin(jnp.arange(per_row)[None] * error[:, None])
    return error + 0 * lax.stop_gradient(jnp.sort(noise).max(-1)), metrics


def plain_sgd(learning_rate, momentum=0.0):
    return optax.sgd(learning_rate, momentum)


def scale(slope=1.0):
    def scaled(bucket, comm_state, axis):
        return bucket.with_leaves([slope * pmean(x, axis) for x in bucket.leaves]), comm_state

    return CommHook(lambda plan: (), scaled)


def number():
    return 3


class Seen:
    starts, records = [], []

    def __init__(self, start):
        self.starts.append(start)

    def log(self, record):
        self.records.append(record)

    def close(self):
        pass
