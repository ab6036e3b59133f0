# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train your own model
#
# Your model, in `flax.nnx` or `flax.linen`, needs no change: no base class, and no name of a mesh
# axis. The model of this notebook reads sentences of different lengths, so the loss has a mask, and
# the mean is over tokens. `jddp.verify` shows whether eight devices train it as one device does.

# %%
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jddp
from jddp.data import TrainBatches, eval_batches

jax.config.update("jax_num_cpu_devices", 8)  # before the first use of a device
jax.device_count()

# %% [markdown]
# ## Data: a dict of arrays
#
# The data are made up: each sentence has up to 20 brackets, and the class of a bracket is its
# depth. `weight` is 0 after the end of a sentence.

# %%
LENGTH, DEPTHS = 20, 6
BRACKETS = np.array([".", "(", ")"])


def make_sentences(number, seed):
    """Brackets (n, 20) of nested expressions, their depths, and which of them exist."""
    rng = np.random.default_rng(seed)
    length = rng.integers(4, LENGTH + 1, size=number)
    depth, words, depths = np.zeros(number, int), [], []
    for _ in range(LENGTH):
        opens = (depth == 0) | ((depth < DEPTHS - 1) & (rng.random(number) < 0.5))
        depth = depth + np.where(opens, 1, -1)
        words.append(np.where(opens, 1, 2))
        depths.append(depth)
    exists = np.arange(LENGTH) < length[:, None]
    words, depths = np.stack(words, axis=1) * exists, np.stack(depths, axis=1) * exists
    return {
        "words": words.astype(np.int32),
        "depth": depths.astype(np.int32),
        "weight": exists.astype(np.float32),
    }


train, test = make_sentences(8192, seed=0), make_sentences(1000, seed=1)
batches = TrainBatches(train, global_batch_size=256, seed=0)
test_batches = eval_batches(test, global_batch_size=256)
for row in range(3):
    print("".join(BRACKETS[test["words"][row]]), test["depth"][row])


# %% [markdown]
# ## The model, as you have it
#
# An embedding, a recurrent layer, dropout and a batch norm: parameters, random numbers and
# statistics. All of it is Flax.


# %%
class Reader(nnx.Module):
    """A GRU that predicts a class for each word."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(3, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.gru = nnx.RNN(nnx.GRUCell(16, 64, rngs=rngs))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, DEPTHS, rngs=rngs)

    def __call__(self, words):
        """Returns logits (b, 20, 6) for words (b, 20)."""
        return self.head(self.dropout(self.gru(self.norm(self.embed(words)))))


# %% [markdown]
# ## The loss
#
# It runs on the rows of one replica. Sentences differ in length, so the number of words differs
# between replicas, and a mean of the replicas' means would be wrong. `jddp.Mean(total, count)` is
# summed over all replicas and divided once, which is the mean over all words of the batch.


# %%
def loss_fn(model, batch):
    logits, weight = model(batch["words"]), batch["weight"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["depth"])
    hits = logits.argmax(-1) == batch["depth"]
    accuracy = jddp.Mean(hits * weight, weight)
    return jddp.Mean(losses * weight, weight), {"accuracy": accuracy}


# %% [markdown]
# ## Is it the same as on one device?
#
# `verify` takes one step on eight devices and the same step on one, and compares loss, gradients,
# statistics and update. The model uses random numbers, so the one device runs the eight replica
# batches with their eight keys.

# %%
model = Reader(nnx.Rngs(0))
optimizer = optax.adam(5e-3)
jddp.verify(model, optimizer, loss_fn, batches.batch(0))


# %% [markdown]
# Now the mistake: a loss that divides by the number of words of its own replica. It is a scalar, so
# jddp warns; the program runs, but trains on other gradients. `verify` finds the difference and its
# cause.


# %% tags=["remove-stderr"]
def wrong_loss_fn(model, batch):
    logits, weight = model(batch["words"]), batch["weight"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["depth"])
    return (losses * weight).sum() / weight.sum()


without_dropout = nnx.clone(model)
without_dropout.dropout.rate = 0.0
jddp.verify(without_dropout, optimizer, wrong_loss_fn, batches.batch(0))

# %% [markdown]
# ## Train, with metrics of your own
#
# Evaluation metrics that are not means over examples are computed from sums:
# `jddp.Metric(values, compute)`. Here it is the accuracy for each depth.


# %%
def eval_fn(model, batch):
    logits, weight = model(batch["words"]), batch["weight"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["depth"])
    truth = jax.nn.one_hot(batch["depth"], DEPTHS) * weight[..., None]
    hits = (logits.argmax(-1) == batch["depth"])[..., None] * truth
    table = jnp.stack([hits, truth], axis=2)  # (b, 20, 2, 6): right, all
    by_depth = jddp.Metric(table, lambda sums, count: sums[0] / sums[1].clip(1))
    return jddp.Mean(losses * weight, weight), {"by_depth": by_depth}


folder = tempfile.TemporaryDirectory(prefix="jddp-")  # a path of your own, to keep it
ddp = jddp.DataParallel(model, optimizer, loss_fn, eval_fn=eval_fn)
run = jddp.fit(ddp, batches, num_steps=100, evaluate=test_batches, run_dir=folder.name)

# %%
accuracy = np.asarray(run.evaluate()["by_depth"])
for depth in range(1, DEPTHS):
    print(f"depth {depth}: {accuracy[depth]:.3f}")

# %% [markdown]
# ## Use it afterwards
#
# `run.model` is an NNX module like yours, with the trained parameters and in eval mode. The run
# directory holds the same model: `jddp.open_run` opens it in any other program, on any number of
# devices.

# %%
trained = jddp.open_run(folder.name, model=Reader(nnx.Rngs(0))).model
words = test["words"][:3]
guesses = np.asarray(trained(words).argmax(-1))
for sentence, depths in zip(words, guesses, strict=True):
    print("".join(BRACKETS[sentence]), depths)

# %% [markdown]
# ## Next steps
#
# [Losses](../../docs/losses.md) describes every form of a loss,
# [fine-tuning](../../docs/fine_tuning.md) pretrained weights and frozen layers, and
# [models](../../docs/models.md) models that are not Flax. [From Python](../../docs/python.md) has
# checkpoints for a loop of your own.
