"""One device with the whole batch; under dropout, the replicas side by side with their keys."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from jddp.engine.state import Inputs
from jddp.engine.step import replica_step


def mean_over_valid(values, mask):
    values = values.astype(jnp.float32)
    if mask is None:
        return values.mean()
    weights = jnp.broadcast_to(
        mask.astype(jnp.float32).reshape(mask.shape + (1,) * (values.ndim - mask.ndim)),
        values.shape,
    )
    return (values * weights).sum() / weights.sum()


def whole_batch_step(model, optimizer, loss_fn, *, max_grad_norm=None, ema_decay=None):
    """A plain training step of the user's own model, unaware of replicas."""
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)

    def linen(params, model_state, batch):
        (losses, metrics), written = nn.apply(
            lambda m: loss_fn(m, batch, True), model, mutable=list(model_state)
        )({"params": params, **model_state})
        return losses, metrics, {**model_state, **written}

    def nnx_(params, model_state, batch):
        module = nnx.merge(nnx.graphdef(model), params, model_state["rngs"], model_state["rest"])
        module.train()
        losses, metrics = loss_fn(module, batch, True)
        rest = nnx.to_pure_dict(nnx.split(module, nnx.Param, nnx.RngState, ...)[3])
        return losses, metrics, {**model_state, "rest": rest}

    run = linen if isinstance(model, nn.Module) else nnx_

    @jax.jit
    def step(state, batch):
        mask = batch.get("mask")

        def loss(params):
            losses, metrics, written = run(params, state.model_state, batch)
            return mean_over_valid(losses, mask), (metrics, written)

        (value, (metrics, written)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        grads, _ = clip.update(grads, clip.init(grads))
        updates, opt_state = update_with_loss(optimizer, grads, state, value)
        new = state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            model_state=written,
            opt_state=opt_state,
        )
        if ema_decay is not None:
            average = optax.incremental_update(new.params, state.ema_params, 1 - ema_decay)
            new = new.replace(ema_params=average)
        return new, {"loss": value, **{k: mean_over_valid(x, mask) for k, x in metrics.items()}}

    return step


def update_with_loss(optimizer, grads, state, loss):
    if optimizer.update.__qualname__.startswith("sam."):  # takes no loss, whatever its type says
        return optimizer.update(grads, state.opt_state, state.params)
    update = optax.with_extra_args_support(optimizer).update
    return update(grads, state.opt_state, state.params, value=loss)


def vmapped_step(ddp, num_replicas, batch):
    """The step of `ddp` with its replicas side by side on one device."""
    replica = functools.partial(replica_step, ddp.steps.spec, ddp.steps.planned(batch).plan)
    mapped = jax.vmap(replica, in_axes=(None, 0), axis_name="data")

    @jax.jit
    def step(state, batch):
        shares = jax.tree.map(lambda x: x.reshape(num_replicas, -1, *x.shape[1:]), batch)
        return jax.tree.map(lambda x: x[0], mapped(state, Inputs(shares)))

    return step


def with_metrics(loss_fn):
    """The loss in one form: of three arguments, and with metrics, if only none."""
    takes_train = "train" in inspect.signature(loss_fn).parameters

    def adapted(model, batch, train):
        outputs = loss_fn(model, batch, train) if takes_train else loss_fn(model, batch)
        return outputs if isinstance(outputs, tuple) else (outputs, {})

    return adapted
