"""ResNet-50 and GPT-2, compiled through `jddp.DataParallel` for H100s that are not there."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
from flax import linen as nn

import jddp
from jddp.inspection.hlo import HloProgram, read_program
from jddp.reduce.hooks import CommHook
from jddp.reduce.plan import BucketPlan
from jddp.workbench.described import described_mesh
from jddp.zoo.losses import cross_entropy, next_token
from jddp.zoo.models import GPT, resnet50

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
    """A step, compiled for described GPUs."""

    plan: BucketPlan
    program: HloProgram
    argument_bytes: int
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


FORMS = ("unrolled", "scanned", "scanned, remat")


class Block(nn.Module):
    """A block of GPT-2, in bfloat16."""

    num_heads: int

    @nn.compact
    def __call__(self, x, _=None):
        width, dtype = x.shape[-1], "bfloat16"
        y = nn.Dense(3 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
        heads = y.reshape(*x.shape[:2], 3, self.num_heads, -1)
        mixed = jax.nn.dot_product_attention(*heads.transpose(2, 0, 1, 3, 4), is_causal=True)
        x = x + nn.Dense(width, dtype=dtype)(mixed.reshape(x.shape))
        y = nn.gelu(nn.Dense(4 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
        return x + nn.Dense(width, dtype=dtype)(y), None


class Layers(nn.Module):
    """GPT-2, whose blocks are written out, or are one scan, each recomputed or not."""

    form: str
    num_layers: int
    num_heads: int
    width: int
    vocab_size: int
    length: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab_size, self.width, dtype="bfloat16")
        places = self.param("places", nn.initializers.normal(0.02), (1, self.length, self.width))
        x = embed(tokens) + places.astype("bfloat16")
        if self.form == "unrolled":
            for _ in range(self.num_layers):
                x, _ = Block(self.num_heads)(x)
        else:
            block = nn.remat(Block, prevent_cse=False) if "remat" in self.form else Block
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(block, length=self.num_layers, **axes)(self.num_heads)(x, None)
        return embed.attend(nn.LayerNorm(dtype="bfloat16")(x)).astype("float32")


def layers_loss(model, batch):
    """The losses of the next tokens."""
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])


def _of_matrices(params):
    """The kernels of layers, stacked by a scan or not; Adam updates all else, as embeddings."""
    dims = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: dims if path[-1].key == "kernel" else None, params
    )


OPTIMIZERS = {
    "adamw": optax.adamw(6e-4, b2=0.95, weight_decay=0.1),
    "muon": optax.contrib.muon(
        2e-2, weight_decay=0.1, adam_b2=0.95, muon_weight_dimension_numbers=_of_matrices
    ),
}


def compile_layers(
    form, *, rows, num_hosts=1, devices_per_host=8, sizes, optimizer="adamw", **options
):
    """A GPT-2 of `sizes` in one of `FORMS`, `rows` sequences a GPU, with one of `OPTIMIZERS`."""
    batch_shape = (rows * devices_per_host, sizes["length"] + 1)  # of one process, a host
    batch = {"tokens": jax.ShapeDtypeStruct(batch_shape, np.int32)}
    mesh = described_mesh("h100_sxm", num_hosts=num_hosts, devices_per_host=devices_per_host)
    ddp = jddp.DataParallel(
        Layers(form, **sizes), OPTIMIZERS[optimizer], layers_loss, mesh=mesh, **options
    )
    return _compile(ddp, batch)


def _compile(ddp, batch):
    compiled = ddp.steps.lower(batch).compile()
    memory = compiled.memory_analysis()
    return Compiled(
        plan=ddp.steps.planned(batch).plan,
        program=read_program(compiled.as_text()),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )
