"""The memory of a step is known before it runs; where it is too much, smaller steps are found."""

import dataclasses
import functools
import math
import os
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from tiny import loss_fn, make_batch

import jddp
from jddp.ground.errors import OutOfMemoryError
from jddp.inspection import memory as memory_module
from jddp.inspection.memory import ways_out

HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
PER_ROW = HOST // 8 // 4  # floats: an eighth of the host, which two devices share

WHILE_MADE = 5  # times the largest parameter: random bits, two words for each number, and values


def greedy(model, batch, train):
    """As much memory for every row as an eighth of the host has."""
    losses, metrics = loss_fn(model, batch, train)
    noise = jnp.sin(jnp.arange(PER_ROW)[None] * losses[:, None])
    return losses + 0 * jax.lax.stop_gradient(jnp.sort(noise).max(-1)), metrics


def specs(batch):
    return jax.eval_shape(lambda x: x, batch)


wrapped = functools.partial(tiny.wrapped, None, optax.adam(0.1))


def test_the_steps_that_would_fit_are_the_largest_that_do():
    batch, ddp = make_batch(32), wrapped(greedy)
    ways = " ".join(ways_out(ddp, specs(batch), jddp.memory(ddp, batch)))
    parts, rows = map(int, re.findall(r"accumulate_steps=(\d+) .* global batch of (\d+)", ways)[0])
    assert jddp.memory(ddp, batch, accumulate_steps=parts).fits
    assert not jddp.memory(ddp, batch, accumulate_steps=parts // 2).fits
    assert jddp.memory(ddp, make_batch(rows)).fits
    assert not jddp.memory(ddp, make_batch(rows * 2)).fits


def test_a_step_without_memory_ends_with_77_and_another_error_of_xla_stays_what_it_is():
    def fails(_):
        raise OSError("no space")

    def failing(model, batch, train):
        losses, _ = loss_fn(model, batch, train)
        return losses + jax.pure_callback(fails, losses, jax.lax.stop_gradient(losses))

    with pytest.raises(OutOfMemoryError, match="--dry-run") as caught:
        jddp.fit(wrapped(greedy), [make_batch(32)], num_steps=1)
    assert caught.value.exit_code == 77
    with pytest.raises(jax.errors.JaxRuntimeError, match="no space"):
        jddp.fit(wrapped(failing, mesh=1), [make_batch(4)], num_steps=1)
    assert jddp.fit(wrapped(loss_fn), [make_batch(32)], num_steps=1).step == 1  # none the worse


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", jddp.LocalSteps(2)])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_the_sum_is_the_compiler_s_and_the_start_holds_the_state(strategy, accumulate_steps):
    ddp = wrapped(loss_fn, strategy=strategy, accumulate_steps=accumulate_steps)
    batch = make_batch(8)
    memory = jddp.memory(ddp, batch)
    assigned = ddp.steps.lower(batch).compile().memory_analysis()
    assert memory.total == pytest.approx(
        assigned.argument_size_in_bytes
        + assigned.temp_size_in_bytes
        + assigned.output_size_in_bytes
        - assigned.alias_size_in_bytes,
        abs=64,  # keys and counts
    )
    state = ddp.init(0, batch)
    of_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    largest = max(x.nbytes for x in jax.tree.leaves(ddp.model(state)))
    assert of_device <= memory.start <= of_device + WHILE_MADE * largest
    assert memory.peak == max(memory.start, memory.total)


def test_no_device_holds_all_parameters_while_parts_of_them_are_made():
    width, num = 64, 12
    layers = nn.Sequential([nn.Dense(width) for _ in range(num)])
    batch = {"x": np.ones((8, width), np.float32)}
    ddp = jddp.DataParallel(
        layers, optax.adamw(0.1), lambda m, b: (m(b["x"]) ** 2).mean(-1), mesh=8, strategy="fsdp"
    )
    memory = jddp.memory(ddp, batch)
    beside = memory.start - memory.parameters - memory.optimizer
    assert beside <= WHILE_MADE * 4 * width * width < 4 * num * width * width / 2


def test_where_the_start_is_too_much_no_smaller_step_is_suggested():
    memory = jddp.memory(wrapped(loss_fn), make_batch(8))
    assert [*memory.cuts(4)] == [2, 4]
    large = dataclasses.replace(memory, start=int(memory.limit) + 1)
    assert not large.fits
    assert not [*ways_out(wrapped(loss_fn), specs(make_batch(8)), large)]


def device(platform, stats):
    return SimpleNamespace(platform=platform, memory_stats=lambda: stats)


def test_the_memory_of_the_host_is_never_that_of_a_gpu(monkeypatch):
    monkeypatch.setattr(memory_module, "smallest_bytes", lambda: None)
    limit = memory_module._device_limit
    assert limit([device("gpu", {"bytes_limit": 7})]) == 7
    assert limit([device("cpu", None)] * 4) == HOST // 4
    assert limit([device("gpu", None)]) == math.inf  # XLA_PYTHON_CLIENT_ALLOCATOR=platform
    monkeypatch.setattr(memory_module, "smallest_bytes", lambda: 2**30)
    assert limit([device("gpu", None)]) == 2**30
