"""An image classifier of the `pmap` era, in the structure of Flax's ImageNet example.

A residual network whose batch norms name the axis "batch" themselves, a loss with an L2 penalty
on its weights, means of gradients and metrics over that axis, SGD with Nesterov momentum, and
running statistics that are averaged over the devices before they are used.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

WEIGHT_DECAY = 1e-3


class Block(nn.Module):
    width: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.width, (3, 3), strides=2)(x)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(self.width, (3, 3))(y))
        return nn.relu(y + self.norm()(self.conv(self.width, (1, 1), strides=2)(x)))


class ResNet(nn.Module):
    widths: tuple[int, ...] = (8,)
    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train=True):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name="batch"
        )
        x = nn.relu(norm()(conv(self.widths[0], (3, 3))(x)))
        for width in self.widths:
            x = Block(width, conv, norm)(x)
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


class State(NamedTuple):
    params: Any
    batch_stats: Any
    opt_state: Any


def cross_entropy(logits, labels):
    return -jnp.sum(jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits), -1)


def penalty(params):
    weights = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    return WEIGHT_DECAY * 0.5 * sum(jnp.sum(x**2) for x in weights)


def make_optimizer():
    schedule = optax.cosine_decay_schedule(0.1, 10)
    return optax.sgd(schedule, momentum=0.9, nesterov=True)


def train_step(optimizer, state, batch):
    def forward(params):
        logits, written = ResNet().apply(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
        )
        loss = cross_entropy(logits, batch["label"]).mean() + penalty(params)
        return loss, (logits, written["batch_stats"])

    (loss, (logits, batch_stats)), grads = jax.value_and_grad(forward, has_aux=True)(state.params)
    grads = lax.pmean(grads, "batch")
    metrics = {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, batch_stats, opt_state), lax.pmean(metrics, "batch")


def make_step(optimizer):
    return jax.pmap(functools.partial(train_step, optimizer), axis_name="batch")


average_statistics = jax.pmap(lambda x: lax.pmean(x, "batch"), axis_name="batch")


def replicate(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * jax.local_device_count()), tree)
