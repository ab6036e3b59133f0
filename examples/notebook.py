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
# # Eight replicas learn to tell clothes apart
#
# In data parallelism every device holds a copy of the model, a *replica*, and sees a share of each
# batch. Once a step the gradients are averaged, and all replicas make the same update. Here that
# happens on eight virtual devices of one CPU; where there are GPUs, they are taken instead.
#
# This file is the notebook: Jupyter opens it with [jupytext](https://jupytext.readthedocs.io), and
# `scripts/notebook` runs it, in about a minute, and writes an `.ipynb` with all its pictures.

# %%
import itertools
import signal
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn

import jddp
from jddp.data import TrainBatches, eval_batches, make_source

jax.config.update("jax_num_cpu_devices", 8)  # before the first use of a device
jax.device_count()

# %% [markdown]
# ## Images
#
# Fashion-MNIST comes with jddp: 10,000 test images, and 15,000 to train on. `TrainBatches` never
# ends, and its order is a function of the seed alone; `eval_batches` holds every example once.

# %%
CLASSES = ["t-shirt", "trousers", "pullover", "dress", "coat"]
CLASSES += ["sandal", "shirt", "sneaker", "bag", "boot"]

data = make_source("fashion_mnist").load()
batches = TrainBatches(data.train, global_batch_size=256, seed=0)
test_batches = eval_batches(data.test, global_batch_size=1000)
test = data.test.take(np.arange(len(data.test)))
print(data.description)


# %%
def draw(rows, guesses):
    """Draws test images with their classes; over a wrong guess also the guess."""
    height = -(-len(rows) // 10)
    figure = plt.figure(figsize=(12, 1.7 * height), layout="constrained")
    panels = figure.subplots(height, 10)
    for panel, row in zip(panels.flat, rows, strict=True):
        guess, truth = CLASSES[guesses[row]], CLASSES[test["label"][row]]
        is_right = guess == truth
        panel.imshow(test["image"][row, ..., 0], cmap="gray_r")
        panel.set_title(
            truth if is_right else f"{guess}?\n{truth}", color="black" if is_right else "crimson"
        )
        panel.axis("off")
    plt.show()


draw([np.flatnonzero(test["label"] == i)[0] for i in range(10)], test["label"])


# %% [markdown]
# ## Model and loss
#
# The model is plain Flax. The loss is run on one replica's rows, and gives one number for each of
# them: the mean over all replicas is jddp's business. What is asked in evaluation only stands in a
# function of its own. A `jddp.Metric` is what is no mean but can be told from sums, such as a table
# of which class was taken for which.


# %%
class Net(nn.Module):
    """Three strided convolutions with batch norm, and a dense layer."""

    @nn.compact
    def __call__(self, x, train):
        """Returns logits (b, 10) for images (b, 28, 28, 1)."""
        for width in (16, 32, 64):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(len(CLASSES))(x.reshape(len(x), -1))


def loss_fn(model, batch, train):
    logits = model(batch["image"], train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"accuracy": logits.argmax(-1) == batch["label"]}


def judge(model, batch):
    logits = model(batch["image"], False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    truth, guess = (
        jax.nn.one_hot(x, len(CLASSES), dtype=jnp.int32)
        for x in (batch["label"], logits.argmax(-1))
    )
    pairs = truth[:, :, None] * guess[:, None, :]
    return losses, {
        "accuracy": (truth * guess).sum(-1),
        "confusion": jddp.Metric(pairs, lambda sums, count: sums),
    }


# %% [markdown]
# ## One object for all of it
#
# `ddp` knows the devices, and says how the gradients travel: in *buckets*, which are made once.
# `explain` compiles the step, and counts what it really sends.

# %%
NUM_STEPS = 400

rate = optax.cosine_onecycle_schedule(NUM_STEPS, 0.01)
ddp = jddp.DataParallel(Net(), optax.adamw(rate), loss_fn, eval_fn=judge, bucket_mb=0.05)
state = ddp.init(seed=0, batch=batches.batch(0))
ddp

# %%
print(ddp.explain(batches.batch(0)))

# %% [markdown]
# Each batch norm sends its sums in the forward pass, and what belongs to them in the backward pass,
# where XLA lets one of them ride with the loss: statistics are those of the whole batch, so that
# eight devices train as one would.
#
# ## A loop of one's own
#
# A step takes the state and 256 rows, splits the rows over the devices, and returns before it is
# done. Reading a metric waits for it, so a loop reads one now and then.

# %%
for number, batch in enumerate(itertools.islice(batches, 20), start=1):
    state, metrics = ddp.step(state, batch)
    if number % 5 == 0:
        print(f"step {number:2}: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.0%}")

state

# %% [markdown]
# A step reuses the memory of the state before it. So what if a loop without an end is stopped, and
# the new state has not reached its name? Nothing is lost: the newest state is `ddp.latest`.

# %%
try:
    for number, batch in enumerate(batches):
        state, metrics = ddp.step(state, batch)
        if number == 30:
            signal.raise_signal(signal.SIGINT)  # what the stop button sends
except KeyboardInterrupt:
    print(f"interrupted at step {ddp.latest.step}")

# %% [markdown]
# ## A loop with everything
#
# `fit` goes on from there: with evaluations, records and checkpoints. Interrupted, it ends the step
# under way, saves, and returns; then the same call, with the same `run_dir`, goes on with the same
# bits.

# %%
folder = tempfile.TemporaryDirectory(prefix="jddp-")  # a path of your own, to keep it
run = ddp.fit(
    batches,
    num_steps=NUM_STEPS,
    state=ddp.latest,
    evaluate=test_batches,
    eval_every_steps=100,
    log_every_steps=10,
    run_dir=folder.name,
)
run

# %%
run.plot()

# %% [markdown]
# ## What it has learned
#
# Evaluation is exact over all 10,000 images, whatever the number of devices.

# %%
judged = run.evaluate()
print(f"test accuracy {judged['accuracy']:.4f} on {judged['examples']:,} images")

# %%
table = np.array(judged["confusion"])
figure, panel = plt.subplots(figsize=(6.5, 6), layout="constrained")
panel.imshow(np.sqrt(table), cmap="Blues")  # roots, or the diagonal outshines all mistakes
panel.set_xticks(range(10), CLASSES, rotation=45, ha="right")
panel.set_yticks(range(10), CLASSES)
panel.set(xlabel="taken for", ylabel="is")
for (row, column), number in np.ndenumerate(table):
    color = "white" if number > 400 else "black"
    panel.text(column, row, number or "", ha="center", va="center", color=color, fontsize=9)
plt.show()

# %% [markdown]
# Shirts are the hard ones. Here are the first twenty images; where the model is wrong, its guess
# stands above what is right.

# %%
chances = np.asarray(jax.nn.softmax(run.predict()))
guesses = chances.argmax(-1)
draw(range(20), guesses)

# %% [markdown]
# And the twenty mistakes of which it was surest. Would you have known?

# %%
is_wrong = guesses != test["label"]
draw(np.argsort(-chances.max(-1) * is_wrong)[:20], guesses)

# %% [markdown]
# ## Where to go from here
#
# The [README](../README.md) has the options of `DataParallel`, and the command line, which is this
# loop driven by a config. On several machines, the same program is started on each, with JAX's
# coordinator in its environment. The other examples beside this one are short: two networks in a
# game, losses in which rows of all replicas meet, environments that stay on their devices.
