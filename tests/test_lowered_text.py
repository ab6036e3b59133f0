"""The step's program is the one that is pinned, for sets of options that cover all pairs.

What promises to change no number leaves the lowered text as it is. A change that must change it
pins those cases anew and says why:

    JAX_PLATFORMS=cpu python tests/test_lowered_text.py          pins the cases that differ
    JAX_PLATFORMS=cpu python tests/test_lowered_text.py --new    chooses the sets of options anew
"""

import hashlib
import itertools
import json
import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jddp
from jddp import powersgd

PINNED = Path(__file__).with_suffix(".json")
ROWS, FEATURES, CLASSES = 16, 3, 4

# Each option with its values, the default first.
VALUES = {
    "model": ["linen", "nnx", "dense"],
    "loss": ["losses", "tokens", "scalar", "mean", "constants"],
    "mask": [False, True],
    "optimizer": ["sgd", "adamw", "plateau"],
    "mesh": [8, 1, 2],
    "bucket_mb": [25, 2**-14, [2**-15, 2**-13]],
    "layout": ["auto", "leaf", "flat"],
    "overlap": ["auto", False, True],
    "wire_dtype": [None, "bfloat16"],
    "comm_hook": [None, "halves", "powersgd"],
    "batch_norm": ["sync", "local", "broadcast"],
    "batch_norm_group_size": [None, 2],
    "batch_norm_unbiased": [False, True],
    "counts": [None, "sum", "per replica"],
    "accumulate_steps": [1, 2],
    "shard_optimizer": [False, True],
    "logical_replicas": [None, 8],
    "local_steps": [None, "mean", "outer", "start"],
    "max_grad_norm": [None, 0.1],
    "ema_decay": [None, 0.9],
    "unused_parameters": ["zero", "skip"],
    "skip_nonfinite": [False, True],
    "loss_scale": [None, 1024.0, "dynamic"],
    "axis_name": [None, "batch"],
}
OBJECTS = {
    "halves": lambda: jddp.CommHook(lambda plan: (), _halves),
    "powersgd": lambda: powersgd(1),
    "mean": lambda: jddp.LocalSteps(2),
    "outer": lambda: jddp.LocalSteps(3, optax.sgd(0.7, momentum=0.9)),
    "start": lambda: jddp.LocalSteps(2, start=4),
}


def _halves(bucket, state, axis):
    half = jax.tree.map(lambda x: x / 2, bucket)
    return jax.lax.pmean(jax.tree.map(jnp.add, half, half), axis), state


class LinenModel(linen.Module):
    """Batch norm, dropout, counts, and a parameter that no gradient reaches."""

    counts: bool
    norm: bool

    @linen.compact
    def __call__(self, x, mask, train):
        self.param("unused", linen.initializers.ones, (2,))
        x = linen.Dense(5)(x)
        if self.norm:
            x = linen.BatchNorm(not train)(x, mask=mask)
            x = linen.Dropout(0.1, deterministic=not train)(x)
        if self.counts:
            seen = self.variable("counts", "seen", jnp.zeros, (), jnp.int32)
            if train and not self.is_initializing():
                seen.value += (x > 0).sum()
        return linen.Dense(CLASSES)(linen.softmax(x))


class Counts(nnx.Variable):
    """A count of what was seen."""


class NnxModel(nnx.Module):
    """As `LinenModel`."""

    def __init__(self, counts):
        rngs = nnx.Rngs(0)
        self.unused = nnx.Param(jnp.ones(2))
        self.first, self.last = (
            nnx.Linear(FEATURES, 5, rngs=rngs),
            nnx.Linear(5, CLASSES, rngs=rngs),
        )
        self.norm, self.dropout = nnx.BatchNorm(5, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.seen = Counts(jnp.zeros((), jnp.int32)) if counts else None

    def __call__(self, x, mask, train):
        x = self.norm(self.first(x), use_running_average=not train, mask=mask)
        x = self.dropout(x, deterministic=not train)
        if self.seen is not None and train:
            self.seen[...] += (x > 0).sum()
        return self.last(jax.nn.softmax(x))


def make_loss(form):
    def losses_and_right(model, batch, train):
        mask = batch.get("mask")
        logits = model(batch["x"], None if mask is None else mask[:, None] > 0, train)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses, logits.argmax(-1) == batch["y"]

    def loss_fn(model, batch, train):
        losses, right = losses_and_right(model, batch, train)
        match form:
            case "tokens":
                return jnp.stack([losses, losses], 1), {"accuracy": right}
            case "scalar":
                return losses.mean(), {"accuracy": right.mean()}
            case "mean":
                return jddp.Mean(losses.sum(), losses.size), {"sum": jddp.Mean(right.sum(), 1)}
        return losses, {"accuracy": right}

    def with_constants(model, batch, train, constants):
        losses, right = losses_and_right(model, batch, train)
        return losses * constants["factor"], {"accuracy": right}

    return with_constants if form == "constants" else loss_fn


def make_model(chosen):
    counts = chosen["counts"] is not None
    if chosen["model"] == "nnx":
        return NnxModel(counts)
    return LinenModel(counts, norm=chosen["model"] == "linen")


def lower(chosen):
    """The lowered text of the step that these options make."""
    optimizers = {
        "sgd": optax.sgd(0.1, momentum=0.9),
        "adamw": optax.adamw(1e-2),
        "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
    }
    options = {k: OBJECTS.get(str(v), lambda v=v: v)() for k, v in chosen.items() if k in KEPT}
    if chosen["counts"] is not None:
        name = "Counts" if chosen["model"] == "nnx" else "counts"
        if chosen["counts"] == "sum":
            options["state_reduction"] = {name: "sum"}
        else:
            options["per_replica"] = (name,)
    ddp = jddp.DataParallel(
        make_model(chosen), optimizers[chosen["optimizer"]], make_loss(chosen["loss"]), **options
    )
    batch = {"x": np.zeros((ROWS, FEATURES), np.float32), "y": np.zeros(ROWS, np.int32)}
    if chosen["mask"]:
        batch["mask"] = np.ones(ROWS, np.float32)
    if chosen["loss"] == "constants":
        ddp = ddp.with_constants({"factor": np.float32(2)})
    return ddp.lower(batch).as_text()


KEPT = set(VALUES) - {"model", "loss", "mask", "optimizer", "counts"}


def digest(chosen):
    return hashlib.sha256(lower(chosen).encode()).hexdigest()


def choose_cases(seed=0, candidates=40, patience=60):
    """Sets of options in which every pair of values occurs that is not refused."""
    rng, seen, cases, failed = random.Random(seed), set(), [], 0

    def pairs(chosen):
        return set(itertools.combinations([(k, str(v)) for k, v in chosen.items()], 2))

    def candidate():
        """A few options that are not at their default, or many."""
        chance = rng.choice([0.2, 0.5, 0.8])
        return {k: rng.choice(v) if rng.random() < chance else v[0] for k, v in VALUES.items()}

    while failed < patience:
        drawn = max((candidate() for _ in range(candidates)), key=lambda x: len(pairs(x) - seen))
        chosen = drawn
        for key in [None, *rng.sample(list(VALUES), len(VALUES))]:  # the fewest changes that do
            if key is not None:
                chosen = {**chosen, key: VALUES[key][0]}
            try:
                found = digest(chosen)
                break
            except (jddp.Error, ValueError):
                continue
        new = pairs(chosen) - seen
        failed = 0 if len(new) > 8 else failed + 1
        if len(new) > 8:
            seen |= new
            cases.append({"options": {k: v for k, v in chosen.items() if v != VALUES[k][0]}})
            cases[-1]["sha256"] = found
            print(len(cases), len(new), cases[-1]["options"], flush=True)
    return cases


def read_cases():
    return json.loads(PINNED.read_text()) if PINNED.exists() else []


def whole(options):
    return {key: options.get(key, values[0]) for key, values in VALUES.items()}


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the texts are of JAX 0.10.2")
@pytest.mark.parametrize("case", read_cases(), ids=lambda case: case["sha256"][:8])
def test_the_lowered_step_is_the_pinned_one(case):
    assert digest(whole(case["options"])) == case["sha256"], case["options"]


def main():
    """Pins what differs, or all."""
    cases = choose_cases() if "--new" in sys.argv else read_cases()
    for case in cases:
        found = digest(whole(case["options"]))
        if found != case["sha256"]:
            print("differs:", case["options"])
            case["sha256"] = found
    PINNED.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
