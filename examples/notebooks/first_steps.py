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
# # Classify clothes on eight replicas
#
# In data parallelism every device holds a copy of the model, a *replica*, and gets a part of each
# batch. Once per step the gradients are averaged, and all replicas make the same update. Here that
# happens on eight virtual devices of one CPU, or on GPUs if there are any.
#
# The notebook is kept as a script: Jupyter opens it with
# [jupytext](https://jupytext.readthedocs.io), `scripts/notebook` runs it and writes an `.ipynb`
# with all its pictures, and `scripts/docs` shows it on the site.

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
# The model is plain Flax. The loss runs on one replica's rows, and returns one number for each of
# them: jddp takes the mean over all replicas. Metrics that only the evaluation needs are in a
# separate function, `judge`. A `jddp.Metric` is a metric computed from sums over all examples, such
# as a confusion matrix.


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
# `ddp` has the devices, and shows how gradients are sent: in *buckets*, which are planned once.
# `explain` compiles the step, and lists the collectives of the compiled program.

# %%
NUM_STEPS = 200

rate = optax.cosine_onecycle_schedule(NUM_STEPS, 0.01)
ddp = jddp.DataParallel(
    Net(), optax.adamw(rate), loss_fn, eval_fn=judge, reduction=jddp.Reduction(bucket_mb=0.05)
)
state = ddp.init(seed=0, batch=batches.batch(0))
ddp

# %%
print(jddp.explain(ddp, batches.batch(0)))

# %% [markdown]
# Each batch norm sends its sums in the forward pass, and their gradients in the backward pass,
# where XLA merges one of them with the loss. The statistics are taken over the global batch, so
# eight devices train as one.
#
# ## Your own loop
#
# A step takes the state and 256 rows, splits the rows over the devices, and returns before the
# devices have finished. Reading a metric waits for the step, so a loop should not read one at every
# step.

# %%
for number, batch in enumerate(itertools.islice(batches, 20), start=1):
    state, metrics = ddp.step(state, batch)
    if number % 5 == 0:
        print(f"step {number:2}: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.0%}")

state

# %% [markdown]
# A step reuses the memory of the state that it is given (donation). If a loop is interrupted before
# the new state has been assigned, nothing is lost: the most recent state is `ddp.latest`.

# %%
try:
    for number, batch in enumerate(batches):
        state, metrics = ddp.step(state, batch)
        if number == 30:
            signal.raise_signal(signal.SIGINT)  # what the stop button sends
except KeyboardInterrupt:
    print(f"interrupted at step {ddp.latest.step}")

# %% [markdown]
# ## The training loop of jddp
#
# `fit` continues from there, with evaluations, records and checkpoints. If it is interrupted, it
# finishes the current step, saves, and returns. The same call, with the same `run_dir`, then
# resumes, and the result is bitwise identical.

# %%
folder = tempfile.TemporaryDirectory(prefix="jddp-")  # a path of your own, to keep it
run = jddp.fit(
    ddp,
    batches,
    num_steps=NUM_STEPS,
    state=ddp.latest,
    evaluate=test_batches,
    eval_every_steps=50,
    log_every_steps=10,
    run_dir=folder.name,
)
run

# %%
run.plot()

# %% [markdown]
# ## Results
#
# Evaluation is exact over all 10,000 images, whatever the number of devices.

# %%
judged = run.evaluate()
print(f"test accuracy {judged['accuracy']:.4f} on {judged['examples']:,} images")

# %%
table = np.array(judged["confusion"])
figure, panel = plt.subplots(figsize=(6.5, 6), layout="constrained")
panel.imshow(np.sqrt(table), cmap="Blues")  # roots, or the diagonal dominates
panel.set_xticks(range(10), CLASSES, rotation=45, ha="right")
panel.set_yticks(range(10), CLASSES)
panel.set(xlabel="taken for", ylabel="is")
for (row, column), number in np.ndenumerate(table):
    color = "white" if number > 400 else "black"
    panel.text(column, row, number or "", ha="center", va="center", color=color, fontsize=9)
plt.show()

# %% [markdown]
# Shirts are the hardest. Here are the first twenty images; where the model is wrong, its guess
# is above the right class.

# %%
chances = np.asarray(jax.nn.softmax(run.predict()))
guesses = chances.argmax(-1)
draw(range(20), guesses)

# %% [markdown]
# And the twenty mistakes with the highest confidence. Would you have known?

# %%
is_wrong = guesses != test["label"]
draw(np.argsort(-chances.max(-1) * is_wrong)[:20], guesses)

# %% [markdown]
# ## Next steps
#
# [Your own model](your_model.py) and [what a step sends](what_is_sent.py) are the next notebooks.
# The [command line](../../docs/command_line.md) runs this loop from a config, and the
# [Python API](../../docs/api.md) has all options. On several machines, the same program is
# [started on each](../../docs/launch.md). The [other examples](../../docs/examples.md) are short: a
# GAN, a contrastive loss, distillation, reinforcement learning, gradient compression.
