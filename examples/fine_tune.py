"""Fine-tuning: weights of another layout, a frozen backbone that is then released, and LoRA.

    python examples/fine_tune.py

`pretrain` stands for the file that you download: names and transposed matrices as PyTorch has them.
Frozen parameters are neither sent nor in the optimizer's state, as the last columns show.
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import safetensors.numpy
from flax import nnx

import jddp
from jddp.data import TrainBatches, eval_batches, make_source

WIDTH, RANK = 256, 4
SOURCE = make_source("fashion_mnist")


class Net(nnx.Module):
    """A backbone of two layers, which may have low-rank adapters, and a head."""

    def __init__(self, num_classes, *, rank=0, seed=0):
        rngs = nnx.Rngs(seed)
        more = {"lora_rank": rank} if rank else {}
        kind = nnx.LoRALinear if rank else nnx.Linear
        self.first = kind(784, WIDTH, rngs=rngs, **more)
        self.second = kind(WIDTH, WIDTH, rngs=rngs, **more)
        self.head = nnx.Linear(WIDTH, num_classes, rngs=rngs)

    def __call__(self, images):
        """Returns logits for images (b, 28, 28, 1)."""
        x = nnx.relu(self.first(images.reshape(len(images), -1)))
        return self.head(nnx.relu(self.second(x)))


def loss_fn(model, batch):
    """Cross entropy, with the accuracy."""
    logits, labels = model(batch["image"]), batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, {"accuracy": logits.argmax(-1) == labels}


def pretrain(file, num_steps):
    """Learns whether an image is of shoes, and writes the backbone in PyTorch's layout."""

    def is_shoes(model, batch):
        labels = np.isin(np.arange(10), [5, 7, 9]).astype("int32")
        return loss_fn(model, batch | {"label": jax.numpy.asarray(labels)[batch["label"]]})

    ddp = jddp.DataParallel(Net(2, seed=1), optax.adamw(1e-3), is_shoes)
    run = jddp.fit(ddp, SOURCE.load().train, global_batch_size=128, num_steps=num_steps)
    model, arrays = ddp.model(run.state), {}
    for name in ("first", "second"):
        layer = getattr(model, name)
        arrays[f"layers.{name}.weight"] = np.ascontiguousarray(np.asarray(layer.kernel[...]).T)
        arrays[f"layers.{name}.bias"] = np.asarray(layer.bias[...])
    safetensors.numpy.save_file(arrays, file)


def read(file):
    """The backbone, by the names that it has here."""
    arrays = safetensors.numpy.load_file(file)
    names = {"weight": "kernel", "bias": "bias"}
    params = {}
    for key, x in arrays.items():
        _, layer, kind = key.split(".")
        params.setdefault(layer, {})[names[kind]] = x.T
    return params


def tune(params, num_steps, *, rank=0, frozen=()):
    """Trains from given parameters; prints how good the model is, and what it took."""
    ddp = jddp.DataParallel(Net(10, rank=rank), optax.adamw(1e-3), loss_fn, frozen=frozen)
    data = SOURCE.load()
    batches = TrainBatches(data.train, global_batch_size=128, seed=0)
    state = ddp.init(0, next(iter(batches)), params=params, partial=True)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    run = jddp.fit(ddp, batches, num_steps=num_steps, state=state)
    found = ddp.evaluate(run.state, eval_batches(data.test, global_batch_size=500))
    return ddp.model(run.state), found, ddp.plan.wire_bytes, num_bytes


def is_given(path):
    """Whether a parameter is one of the backbone, and not of its adapters."""
    return path.split("/")[0] != "head" and "lora" not in path


def main(num_steps=100):
    """Prints a line for each way to tune."""
    with tempfile.TemporaryDirectory() as folder:
        pretrain(file := Path(folder) / "theirs.safetensors", num_steps)
        theirs = read(file)
    backbone = ["first/.*", "second/.*"]
    frozen, *of_frozen = tune(theirs, num_steps, frozen=backbone)
    released = nnx.state(frozen, nnx.Param)
    rows = {
        "frozen": of_frozen,
        "then released": tune(released, num_steps)[1:],
        "all from the start": tune(theirs, num_steps)[1:],
        "LoRA": tune(theirs, num_steps, rank=RANK, frozen=is_given)[1:],
    }
    print(f"{'':20}{'loss':>8}{'accuracy':>10}{'kB sent':>10}{'kB of AdamW':>13}")
    for name, (found, sent, kept) in rows.items():
        shown = (
            f"{found['loss']:8.3f}{found['accuracy']:10.1%}{sent / 1000:10.1f}{kept / 1000:13.1f}"
        )
        print(f"{name:20}{shown}")
    return rows


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Virtual replicas, where there is no GPU.
    main()
