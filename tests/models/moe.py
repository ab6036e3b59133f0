"""A mixture of experts for each token, with a loss that keeps the experts equally busy. NNX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

NUM_TOKENS, LENGTH = 10, 6


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    logits: jax.Array
    balance: jax.Array


class Experts(nnx.Module):
    """Each token goes to the two experts that the router likes best."""

    def __init__(self, width, num_experts, *, rngs):
        make = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(width, num_experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(make(rngs.params(), (num_experts, width, 2 * width)))
        self.down = nnx.Param(make(rngs.params(), (num_experts, 2 * width, width)))

    def __call__(self, x):
        shares = nnx.softmax(self.router(x))
        best, chosen = jax.lax.top_k(shares, 2)
        hits = jax.nn.one_hot(chosen, shares.shape[-1])
        gates = (hits * (best / best.sum(-1, keepdims=True))[..., None]).sum(-2)
        y = nnx.gelu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        y = jnp.einsum("btef,efd,bte->btd", y, self.down[...], gates)
        balance = (hits.sum(-2).mean(1) * shares.mean(1)).sum(-1) * shares.shape[-1]
        return y, balance


class Model(nnx.Module):
    def __init__(self, width, num_experts, *, rngs):
        self.embed = nnx.Embed(NUM_TOKENS, width, rngs=rngs)
        self.experts = Experts(width, num_experts, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        y, balance = self.experts(x)
        return Output(self.embed.attend(self.norm(x + y)), balance)


def make_model():
    return Model(8, 4, rngs=nnx.Rngs(0))


def loss_fn(model, batch, train):
    output = model(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(output.logits, batch["next"]).mean(-1)
    if not train:
        return losses
    return losses + 0.01 * output.balance, {"balance": output.balance}


def make_batch(rows, seed):
    tokens = np.random.default_rng(seed).integers(NUM_TOKENS, size=(rows, LENGTH), dtype=np.int32)
    return {"tokens": tokens, "next": (3 * tokens + 1) % NUM_TOKENS}
