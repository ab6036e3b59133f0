"""Steps compiled for GPUs that are not there, by XLA of the pinned JAX; see `scripts/overlap`."""

import functools
import re
from collections import Counter

import jax
import numpy as np
import optax
import pytest
from described import compile_layers

import jddp
from jddp.inspection.hlo import collectives
from jddp.workbench.described import described_mesh
from jddp.zoo.losses import cross_entropy, next_token
from jddp.zoo.models import CNN, GPT

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("as_users_compile")]

NUM_LAYERS = 4
SIZES = {"num_layers": NUM_LAYERS, "num_heads": 4, "width": 128, "vocab_size": 512, "length": 128}


@pytest.mark.parametrize("num_gathers", [2, 1], ids=["regather", "kept"])
def test_each_layer_of_a_scan_is_gathered_and_its_gradient_scattered_in_the_loops(num_gathers):
    step = compile_layers(
        "scanned",
        rows=8,
        sizes=SIZES,
        strategy=jddp.FSDP(regather=num_gathers == 2),
        precision="bfloat16",  # of all parameters: a unit has one dtype
        reduction=jddp.Reduction(bucket_mb=25),  # a layer is a unit, and what is around it
    )
    found = collectives(step.program)
    runs = Counter((x.op, x.is_in_loop, x.num_runs) for x in found if x.op != "all-reduce")
    assert runs == {
        (op, *place): times
        for op, times in {"all-gather": num_gathers, "reduce-scatter": 1}.items()
        for place in ((True, NUM_LAYERS), (False, 1))
    }
    # No loop, and nothing before one, gathers the stacked layers.
    by_place = {x.is_in_loop: x.num_elements for x in found if x.op == "all-gather"}
    assert by_place[True] < 13 * SIZES["width"] ** 2
    assert by_place[False] < 2 * SIZES["vocab_size"] * SIZES["width"]


def test_groups_gather_among_themselves_and_average_once_what_micro_batches_leave():
    step = compile_layers(
        "scanned",
        rows=8,
        num_hosts=2,
        devices_per_host=4,
        sizes=SIZES,
        strategy=jddp.FSDP(group_size=4),
        accumulate_steps=2,
    )
    sent = {"all-gather": set(), "reduce-scatter": set(), "all-reduce": set()}
    for x in collectives(step.program):
        sent[x.op].add((x.devices, x.is_in_loop))
    host, all_devices = (0, 1, 2, 3), tuple(range(8))
    assert sent == {
        "all-gather": {(host, True)},
        "reduce-scatter": {(host, True)},
        "all-reduce": {((0, 4), False), (all_devices, False)},
    }


IMAGES = {
    "image": jax.ShapeDtypeStruct((64, 28, 28, 1), np.float32),
    "label": jax.ShapeDtypeStruct((64,), np.int32),
}
TOKENS = {"tokens": jax.ShapeDtypeStruct((32, 65), np.int32)}
all_logits = functools.partial(next_token, tile_size=None)
JOBS = {
    "cnn": (CNN(), cross_entropy, IMAGES),
    "gpt": (GPT(num_layers=2, num_heads=4, width=128, max_length=64), all_logits, TOKENS),
}

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
# Libraries of NVIDIA, such as cuDNN and cuBLAS, are called by names with "__cu".
SUMS = re.compile(r' (reduce|reduce-window|dot|convolution|scatter)\(|custom_call_target="__cu')
UNREAD = re.compile(r", (metadata|frontend_attributes|sharding)=\{[^}]*\}|, backend_config=.*")


def canonical(text):
    """The text of instructions without what they are called and where they come from."""
    names = {}
    text = re.sub(r"to_apply=%?[\w.\-]+", "", UNREAD.sub("", text))
    return re.sub(r"%[\w.\-]+", lambda name: names.setdefault(name[0], f"%{len(names)}"), text)


def computations_that_sum(text):
    """Kernels with a sum or maximum, whole; and calls of libraries, which have one."""
    fused = set(re.findall(r"calls=%?([\w.\-]+)", text))
    found = Counter()
    for name, body in COMPUTATION.findall(text):
        parts = [body] if name in fused else body.splitlines()
        found.update(canonical(part.strip()) for part in parts if SUMS.search(part))
    return found


@pytest.mark.parametrize("name", JOBS)
def test_all_computations_that_sum_are_the_same_on_one_two_and_eight_gpus(name):
    model, loss_fn, batch = JOBS[name]
    options = {"strategy": jddp.LogicalReplicas(8), "batch_norm": "local"}

    def on(num_devices):
        mesh = described_mesh("h100_sxm", devices_per_host=num_devices)
        ddp = jddp.DataParallel(model, optax.sgd(0.1), loss_fn, mesh=mesh, **options)
        return computations_that_sum(ddp.steps.lower(batch).compile().as_text())

    one, two, eight = map(on, (1, 2, 8))
    assert one.total() > 20
    assert two - one == one - two == Counter()
    assert eight - one == one - eight == Counter()
