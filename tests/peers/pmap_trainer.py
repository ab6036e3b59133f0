"""Data parallelism by hand with `jax.pmap`, as Flax's ImageNet example has it; state is stacked."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import lax


class State(NamedTuple):
    params: Any
    model_state: Any
    opt_state: Any


def make_replica_step(model, loss_and_accuracy, optimizer, axis):
    def replica_step(state, batch):
        def forward(params):
            logits, model_state = model.apply(
                {"params": params, **state.model_state},
                batch["inputs"],
                train=True,
                mutable=list(state.model_state),
            )
            loss, accuracy = loss_and_accuracy(logits, batch["targets"])
            return loss, (accuracy, model_state)

        grad_fn = jax.value_and_grad(forward, has_aux=True)
        (loss, (accuracy, model_state)), grads = grad_fn(state.params)
        grads = lax.pmean(grads, axis)
        metrics = lax.pmean({"loss": loss, "accuracy": accuracy}, axis)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, model_state, opt_state), metrics

    return replica_step


def make_step(model, loss_and_accuracy, optimizer):
    replica_step = make_replica_step(model, loss_and_accuracy, optimizer, "batch")
    return jax.pmap(replica_step, axis_name="batch", donate_argnums=0)


def replicate(tree):
    return jax.tree.map(lambda x: np.stack([x] * jax.local_device_count()), tree)


def shard(batch):
    return jax.tree.map(lambda x: x.reshape(jax.local_device_count(), -1, *x.shape[1:]), batch)
