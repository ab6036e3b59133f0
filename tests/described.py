"""ResNet-50 and GPT-2 124M, compiled through `jddp.DataParallel` for H100s that are not there."""

from dataclasses import dataclass

import jax
import numpy as np
import optax

import jddp
from jddp.inspection.hlo import HloProgram, read_program
from jddp.reduce.hooks import CommHook
from jddp.reduce.plan import BucketPlan
from jddp.zoo.losses import cross_entropy, next_token
from jddp.zoo.models import GPT, resnet50
from modelled import described_mesh

# Sends nothing: what the step costs without a reduction.
NO_REDUCTION = CommHook(lambda plan: (), lambda bucket, comm_state, axis: (bucket, comm_state))

VARIANTS = {
    "none": {"reduction": jddp.Reduction(layout="leaf", overlap=False, hook=NO_REDUCTION)},
    "leaf, end": {"reduction": jddp.Reduction(layout="leaf", overlap=False)},
    "flat, end": {"reduction": jddp.Reduction(layout="flat", overlap=False)},
    "flat, ready": {"reduction": jddp.Reduction(layout="flat", overlap=True)},
    "sharded": {"reduction": jddp.Reduction(layout="flat", overlap=True), "strategy": "zero1"},
}


@dataclass(frozen=True)
class Compiled:
    """A step, compiled for described GPUs.

    Attributes:
      plan: The buckets that it was asked to send.
      program: What the compiler made of it.
      temporary_bytes: Memory that it needs on each GPU beside its arguments and results.
    """

    plan: BucketPlan
    program: HloProgram
    temporary_bytes: int


def compile_resnet50(*, num_hosts=1, devices_per_host=8, batch_norm="local", **options):
    """ResNet-50 in bfloat16, 256 images of 224 x 224 a GPU, SGD with Nesterov momentum."""
    model = resnet50(dtype="bfloat16")
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    rows = 256 * devices_per_host
    batch = {
        "image": jax.ShapeDtypeStruct((rows, 224, 224, 3), np.float32),
        "label": jax.ShapeDtypeStruct((rows,), np.int32),
    }
    mesh = described_mesh("h100_sxm", num_hosts=num_hosts, devices_per_host=devices_per_host)
    options |= {"batch_norm": batch_norm, "mesh": mesh}
    return _compile(jddp.DataParallel(model, optimizer, cross_entropy, **options), batch)


def compile_gpt2(*, num_hosts=1, devices_per_host=8, **options):
    """GPT-2 124M in bfloat16, 32 sequences of 1,024 tokens a GPU, AdamW."""
    sizes = {"num_layers": 12, "num_heads": 12, "width": 768, "max_length": 1024}
    model = GPT(vocab_size=50257, dtype="bfloat16", **sizes)
    optimizer = optax.adamw(6e-4, b2=0.95, weight_decay=0.1)
    batch = {"tokens": jax.ShapeDtypeStruct((32 * devices_per_host, 1025), np.int32)}
    mesh = described_mesh("h100_sxm", num_hosts=num_hosts, devices_per_host=devices_per_host)
    return _compile(jddp.DataParallel(model, optimizer, next_token, mesh=mesh, **options), batch)


def _compile(ddp, batch):
    compiled = ddp.steps.lower(batch).compile()
    temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
    return Compiled(
        ddp.steps.planned(batch).plan, read_program(compiled.as_text()), temporary_bytes
    )
