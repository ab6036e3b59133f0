"""A modelled step is told in words and numbers that say that it is modelled."""

import dataclasses
import re

import numpy as np
import pytest

from jddp.ground.errors import ConfigError
from jddp.inspection.hlo import Collective
from jddp.inspection.memory import Memory
from jddp.reduce.plan import Bucket, BucketPlan, GatheredUnit
from jddp.workbench.described import Target
from jddp.workbench.prediction import Prediction, ScaledStep, group_transfers
from jddp.workbench.schedule import Timeline, Transfer

MEMORY = Memory(10**9, 10**9, 2 * 10**9, 0, 10**6, 8 * 10**9, limit=80 * 10**9)


def bucket(number, size=25_000, dtype="float32"):
    paths = (f"layer_{number}/kernel", f"layer_{number}/<bias>")
    return Bucket(paths, (0, 1), ((size,), (0,)), np.dtype(dtype), np.dtype(dtype))


def transfer(number, scope, start, *, op="all-reduce", size=25_000, waited=0.0):
    name = f"{op}-start.{number}"
    sent = Collective(name, f"jit(step)/{scope}/psum", op, ("f32",), size, 4 * size, True)
    return Transfer(
        name=name,
        collectives=(sent,),
        bytes=4 * size,
        is_async=True,
        needed_seconds=0.5e-3,
        waited_seconds=waited,
        hiding_seconds=0.5e-3,
        num_products=1,
        started_at=start,
    )


def timeline(transfers, seconds=0.1):
    waited = sum(x.waited_seconds for x in transfers)
    return Timeline(seconds, seconds - waited, tuple(transfers))


def prediction(transfers, plan, topology="1x8", **fields):
    target, time = Target.named("h100", topology), timeline(transfers)
    found = Prediction(
        target, plan, time, group_transfers(time, plan, target.fabric), MEMORY, num_rows=8,
        accumulate_steps=1,
    )  # fmt: skip
    return dataclasses.replace(found, **fields)


def of_buckets(num, **fields):
    sent = [transfer(i, f"bucket_{i}", 0.03 + 0.06 * i / num) for i in range(num)]
    sent.append(transfer(num, "metrics", 0.098, size=4, waited=0.1e-3))
    sent[0] = dataclasses.replace(sent[0], waited_seconds=0.4e-3)
    return prediction(sent, BucketPlan(tuple(map(bucket, range(num)))), **fields)


def test_the_verdict_says_what_leaves_and_what_waits():
    found = of_buckets(3)
    leaves, waits = "32-bit gradients of 0.3 MB leave in 3 buckets", "0.4% of the step waits"
    assert found.verdict.startswith(f"Modelled: {leaves}; {waits} for them, and 0.1% for other")
    assert found.exposed_share == pytest.approx(0.4e-3 / 0.1)
    assert found.sent_bytes == pytest.approx(2 * 7 / 8 * (3 * 100_000 + 16))


def test_a_step_that_needs_more_memory_than_there_is_says_so_first_and_what_would_fit():
    memory = dataclasses.replace(MEMORY, temporaries=100 * 10**9)
    found = of_buckets(3, memory=memory)
    assert found.verdict.startswith("Does not fit: a step needs 104.0 GB of a GPU, which has 80.0")
    assert "accumulate_steps=2 is estimated to fit (54.0 GB). Modelled: 32-bit" in found.verdict
    memory = dataclasses.replace(MEMORY, optimizer=100 * 10**9)
    assert 'try strategy="fsdp"' in of_buckets(3, memory=memory).verdict
    assert 'try strategy="fsdp"' in of_buckets(3, memory=memory, num_rows=1).verdict


def test_the_text_fits_a_terminal_and_lists_each_bucket_and_each_assumption():
    found = str(of_buckets(12))
    assert max(map(len, found.splitlines())) <= 80
    assert found.startswith("Modelled")
    for number in range(12):
        assert f"layer_{number}/kernel .. layer_{number}/<bias>" in found
    assert "nvlink         450.0     3.40" in found


def test_each_bucket_has_its_algorithm_and_what_that_moves():
    sent, by_host = 2 * 63 / 64 * 100_000, 2 * 7 / 8 * 100_000
    for told in of_buckets(2, topology="8x8").as_json()["transfers"][:2]:
        assert (told["algorithm"], told["hops"]) == ("tree LL", 2 * (7 + 3))
        assert told["sent_bytes_per_device"] == pytest.approx(sent)
        assert told["sent_bytes_per_host"] == pytest.approx(by_host)


def test_gathers_are_named_by_the_units_of_their_sizes_forward_and_back():
    units = [GatheredUnit(bucket(i, size), 1, 2) for i, size in enumerate((1000, 8000, 8000))]
    there = "jvp(unit_of_parameters)"
    back = "transpose(jvp())/unit_of_parameters"
    sent = [
        transfer(i, there if i < 3 else back, 0.01 * i, op="all-gather", size=size)
        for i, size in enumerate([1000, 8000, 8000, 8000, 8000, 1000])
    ]
    found = prediction(sent, BucketPlan((), units=tuple(units)))
    labels = [x.label for x in found.groups]
    assert labels == ["unit 0", "unit 1", "unit 2", "unit 2", "unit 1", "unit 0"]
    assert "parameters of 0.14 MB are sent in 6 collectives" in found.verdict


UNKNOWN = [
    (("h10",), "Did you mean 'h100_sxm'"),
    (("tpu",), "Known: h100_sxm, h200_sxm, a100_sxm"),
    (("h100", "8"), "'8' is not HOSTSxGPUS.*Did you mean '1x8'"),
    (("h100", "0x8"), "'0x8' is not HOSTSxGPUS"),
    (("h100", "1x8", ["pcie=1GB/s,1us"]), "Link 'pcie' is unknown"),
]


@pytest.mark.parametrize("words, message", UNKNOWN)
def test_unknown_targets_topologies_and_links_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        Target.named(*words)


def test_larger_worlds_say_which_schedule_they_run():
    scaling = (ScaledStep(8, 0.1, 0.0, 1.0, 8), ScaledStep(256, 0.125, 0.2, 0.8, 64))
    found = of_buckets(3, scaling=scaling)
    assert re.findall(r"^ *(8|256) ", str(found), re.MULTILINE) == ["8", "256"]
    assert [x["num_devices"] for x in found.as_json()["weak_scaling"]] == [8, 256]
    assert "weak scaling" not in str(of_buckets(3))
