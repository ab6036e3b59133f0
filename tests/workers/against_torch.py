"""One process of a jddp job that trains what `peers.torch_ddp` trains."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

import jddp
from jddp import distributed
from jddp.distributed.join import configure_devices
from jddp.zoo.models import GPT, MLP

NUM_STEPS, ROWS, NUM_CLASSES, VOCABULARY, LENGTH = 50, 16, 5, 32, 12
OPTIONS = {"sgd": {"lr": 0.05, "momentum": 0.9}, "adamw": {"lr": 3e-3, "weight_decay": 0.1}}
SIZES = {
    "mlp": {"sizes": (12, 32, 32, NUM_CLASSES)},
    "conv_net": {"widths": (3, 8, 16), "num_classes": NUM_CLASSES},
    "gpt": {"num_layers": 2, "num_heads": 2, "width": 16},
}
SIZES["gpt"] |= {"vocab_size": VOCABULARY, "max_length": LENGTH}


class ConvNet(nn.Module):
    widths: tuple[int, ...]
    num_classes: int

    @nn.compact
    def __call__(self, x):
        for width in self.widths[1:]:
            x = nn.relu(nn.Conv(width, (3, 3), strides=2, padding=1)(x))
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


MODELS = {"mlp": lambda sizes: MLP(sizes[1:-1], sizes[-1]), "conv_net": ConvNet, "gpt": GPT}
OPTIMIZERS = {
    "sgd": lambda lr, momentum: optax.sgd(lr, momentum),
    "adamw": lambda lr, weight_decay: optax.adamw(lr, weight_decay=weight_decay),
}


def make_case(model, optimizer, bucket_mb=25, masked=False):
    of_model = {"model": model, "sizes": SIZES[model], "bucket_mb": bucket_mb, "masked": masked}
    return of_model | {"optimizer": (optimizer, OPTIONS[optimizer])}


CASES = {f"{model}_{name}": make_case(model, name) for model in SIZES for name in OPTIMIZERS}
# NUM-2: a bucket for nearly every leaf.
CASES |= {f"{model}_buckets": make_case(model, "sgd", bucket_mb=1e-4) for model in ("mlp", "gpt")}
CASES["mlp_masked"] = make_case("mlp", "sgd", masked=True)


def make_batches(case):
    """Arrays of (steps, rows, ...), with targets that the inputs tell."""
    rng = np.random.default_rng(0)
    if case["model"] == "gpt":
        tokens = rng.integers(VOCABULARY, size=(NUM_STEPS, ROWS, LENGTH), dtype=np.int32)
        return {"inputs": tokens, "targets": (3 * tokens + 1) % VOCABULARY}
    shape = (8, 8, 3) if case["model"] == "conv_net" else (12,)
    targets = rng.integers(NUM_CLASSES, size=(NUM_STEPS, ROWS), dtype=np.int32)
    centers = rng.standard_normal((NUM_CLASSES, shape[-1]), dtype=np.float32)
    centers = centers[targets].reshape(NUM_STEPS, ROWS, *[1] * (len(shape) - 1), -1)
    inputs = centers + rng.standard_normal((NUM_STEPS, ROWS, *shape), dtype=np.float32)
    batches = {"inputs": inputs, "targets": targets}
    if case["masked"]:
        # All rows of the first process count, and a quarter of the second's.
        valid = np.arange(ROWS) < ROWS * 5 // 8
        batches["mask"] = np.broadcast_to(valid, (NUM_STEPS, ROWS)).astype(np.float32)
    return batches


def write_cases(folder, cases):
    (folder / "cases.json").write_text(json.dumps(cases))
    for name, case in cases.items():
        batches = make_batches(case)
        model = MODELS[case["model"]](**case["sizes"])
        params = model.init(jax.random.key(0), jnp.asarray(batches["inputs"][0]))["params"]
        np.savez(folder / f"{name}.start.npz", **flatten_dict(params, sep="/"))
        np.savez(folder / f"{name}.batches.npz", **batches)


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])


def train_case(folder, name, **options):
    """Returns the losses, the final parameters by path, and the number of buckets."""
    case = json.loads((folder / "cases.json").read_text())[name]
    batches, params = (
        dict(np.load(folder / f"{name}.{what}.npz")) for what in ("batches", "start")
    )
    optimizer, settings = case["optimizer"]
    model, optimizer = MODELS[case["model"]](**case["sizes"]), OPTIMIZERS[optimizer](**settings)
    layout = "flat" if case["bucket_mb"] < 1 else "auto"
    reduction = jddp.Reduction(bucket_mb=case["bucket_mb"], layout=layout)
    ddp = jddp.DataParallel(model, optimizer, loss_fn, reduction=reduction, **options)
    state = ddp.init(params=unflatten_dict(params, sep="/"))
    parts = np.split(np.arange(ROWS), jax.process_count())[jax.process_index()]
    losses = []
    for step in range(NUM_STEPS):
        state, metrics = ddp.step(state, {k: x[step][parts] for k, x in batches.items()})
        losses.append(float(metrics["loss"]))
    params = flatten_dict(ddp.model(state)["params"], sep="/")
    return {"losses": losses, "num_buckets": len(ddp.plan), **params}


def main(folder):
    identity = distributed.resolve_identity()
    configure_devices(identity.num_processes, num_processes=identity.num_processes)
    distributed.initialize(identity)
    for name in json.loads((folder / "cases.json").read_text()):
        np.savez(folder / f"{name}.jddp_{identity.process_id}.npz", **train_case(folder, name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
