"""What eight H100s communicate is hidden, in the schedule that the pinned XLA makes for them."""

import functools
from collections import Counter

import pytest
from described import VARIANTS, compile_gpt2, compile_resnet50
from networks import make_network
from runs import ROOT
from sweeps import swept

from jddp.inspection.hlo import collectives
from jddp.workbench.described import GPUS, target_config
from jddp.workbench.schedule import LARGE_BYTES, walk

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("as_users_compile")]

MODELS = {"resnet50": compile_resnet50, "gpt2": compile_gpt2}

each_model = pytest.mark.parametrize("model", MODELS)
one_model = pytest.mark.parametrize("model", swept(["gpt2", "resnet50"], every=2))

# Buckets that are complete only after the last product of the backward pass: nothing of it is left
# to hide them, but the optimizer is. The position and token embeddings of GPT-2 fill two.
NUM_LATE = {"resnet50": 1, "gpt2": 2}


@functools.cache
def compiled(model, variant):
    return MODELS[model](**VARIANTS[variant])


@functools.cache
def timeline(model, variant):
    return walk(compiled(model, variant).program, GPUS["h100_sxm"], make_network())


@each_model
def test_the_buckets_of_the_plan_are_what_is_sent_in_their_order(model):
    planned = [bucket.bytes for bucket in compiled(model, "flat, ready").plan.buckets]
    sent = [transfer.bytes for transfer in timeline(model, "flat, ready").large]
    assert sent == [num_bytes for num_bytes in planned if num_bytes > LARGE_BYTES]
    small = timeline(model, "flat, ready").small
    assert len(small) == len(planned) - len(sent) + 1  # Loss and metrics.


@each_model
def test_no_bucket_stops_the_computing_and_at_most_a_thousandth_of_the_step_waits(model):
    found = timeline(model, "flat, ready")
    assert all(transfer.is_async for transfer in found.large)
    # Every bucket has a product to hide behind while there are any.
    assert all(transfer.num_products for transfer in found.large[: -NUM_LATE[model]])
    assert found.exposed_share <= 0.001


@one_model
def test_reducing_takes_no_memory_to_speak_of(model):
    without = compiled(model, "none")
    assert not walk(without.program, GPUS["h100_sxm"], make_network()).large
    assert compiled(model, "flat, ready").temporary_bytes <= 1.05 * without.temporary_bytes


def test_the_model_sees_what_is_not_hidden():
    """The negative control: leaf by leaf at the end, ResNet-50 waits, and the walk must say so."""
    found = timeline("resnet50", "leaf, end")
    assert found.exposed_share > 0.01
    assert not all(transfer.is_async for transfer in found.large)


@one_model
def test_a_sharded_update_scatters_each_bucket_and_gathers_it_again(model):
    step = compiled(model, "sharded")
    found = collectives(step.program)
    for op in ("reduce-scatter", "all-gather"):
        padded = [x.bytes for x in found if x.op == op]
        assert len(padded) == len(step.plan)
        assert 0 <= sum(padded) - step.plan.wire_bytes < 0.001 * step.plan.wire_bytes
    assert all(x.is_async for x in found)
    # The last bucket is scattered and gathered with nothing left to compute: 0.1 and 0.2 %.
    assert timeline(model, "sharded").exposed_share <= 0.003


def test_fully_sharded_parameters_travel_hidden_and_take_little_memory():
    step, replicated = compile_gpt2(strategy="fsdp"), compiled("gpt2", "flat, ready")
    times = Counter(x.op for x in collectives(step.program))
    # Of up to 25 MiB. The table's gradient is there with the loss: it is not gathered again.
    assert times["all-gather"] == 2 * times["reduce-scatter"] - 1 >= 2 * 8 - 1
    assert step.temporary_bytes <= 1.05 * replicated.temporary_bytes
    found = walk(step.program, GPUS["h100_sxm"], make_network())
    assert found.exposed_share <= 0.03
    assert found.step_seconds <= 1.06 * timeline("gpt2", "flat, ready").step_seconds


def test_on_one_gpu_jddp_becomes_what_a_step_by_hand_does(monkeypatch):
    """What benchmarks/gpu.py races, for a GPU described by a text such as a device gives."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gpu_compile import compile_one

    text = target_config(GPUS["h100_sxm"])
    by_hand, ours = (compile_one("gpt2_124m", name, text, 1) for name in ("by_hand", "jddp"))
    assert ours["exchanges"] == 0
    assert ours["flops"] == by_hand["flops"]
    assert ours["flops"] == pytest.approx(ours["formula_flops"], rel=0.1)  # without recomputation
    assert ours["temporary_bytes"] <= 1.01 * by_hand["temporary_bytes"]
    assert ours["argument_bytes"] <= by_hand["argument_bytes"] + 1024  # A key, and counts.
