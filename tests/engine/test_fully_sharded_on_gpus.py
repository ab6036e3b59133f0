"""Divided parameters on eight GPUs: a scanned layer is gathered in its loop. Compiled, not run.

No GPU is needed; `scripts/overlap` runs this with JAX's plugin for CUDA. A program is XLA's, and so
belongs to one version of JAX: the pinned one.
"""

from collections import Counter

import pytest
from described import compile_layers

import jddp
from jddp.inspection.collectives import collectives

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
