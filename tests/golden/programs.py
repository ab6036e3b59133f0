"""Fingerprints of lowered steps: of each option with each model, and of each pair of options."""

import hashlib
import itertools
import re

import jax
import optax
from tiny import MODELS, loss_fn, make_batch

import jddp

MIB = 2**20
SYMBOL = re.compile(r"@[\w.$-]+")
OPTIONS = {
    "": {},
    "accumulate_steps": {"accumulate_steps": 2},
    "broadcast": {"batch_norm": "broadcast"},
    "bucket_mb": {"reduction": jddp.Reduction(bucket_mb=40 / MIB)},
    "ema_decay": {"ema_decay": 0.5},
    "flat": {"reduction": jddp.Reduction(layout="flat")},
    "frozen": {"frozen": [".*bias"]},
    "fsdp": {"strategy": "fsdp"},
    "fsdp in groups": {"strategy": jddp.FSDP(group_size=2, regather=False)},
    "groups of statistics": {"batch_norm": jddp.SyncBatchNorm(group_size=2)},
    "hook": {"reduction": jddp.Reduction(hook=jddp.powersgd(1))},
    "local statistics": {"batch_norm": "local"},
    "local steps": {"strategy": jddp.LocalSteps(2)},
    "logical replicas": {"strategy": jddp.LogicalReplicas(8)},
    "loss_scale": {"precision": jddp.Precision(loss_scale="dynamic")},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "overlap": {"reduction": jddp.Reduction(overlap=True, layout="flat")},
    "precision": {"precision": "bfloat16"},
    "skip_nonfinite": {"skip_nonfinite": True},
    "unused_parameters": {"unused_parameters": "skip"},
    "wire": {"reduction": "bfloat16"},
    "zero1": {"strategy": "zero1"},
}


def program(model, *options):
    """The fingerprint of a step on four replicas, or the class of the error that refuses it."""
    given = {k: v for name in options for k, v in OPTIONS[name].items()}
    batch = make_batch(16, masked=True)
    try:
        ddp = jddp.DataParallel(
            MODELS[model](dtype=None), optax.adamw(1e-3), loss_fn, mesh=4, **given
        )
        ddp.init(0, batch)
        return fingerprint(ddp.steps.lower(batch))
    except jddp.Error as error:
        return type(error).__name__


def fingerprint(lowered: jax.stages.Lowered):
    """The hash of a program, with functions named by the order in which they first stand."""
    text = lowered.as_text()
    numbers = {name: f"@{i}" for i, name in enumerate(dict.fromkeys(SYMBOL.findall(text)))}
    return hashlib.sha256(SYMBOL.sub(lambda x: numbers[x[0]], text).encode()).hexdigest()


def is_pair(first, second):
    """Whether both can be given: an option has one value."""
    return bool(first) and OPTIONS[first].keys().isdisjoint(OPTIONS[second])


SINGLES = [(model, option) for model in ("conv", "nnx", "transformer") for option in OPTIONS]
PAIRS = [("conv", *pair) for pair in itertools.combinations(OPTIONS, 2) if is_pair(*pair)]
