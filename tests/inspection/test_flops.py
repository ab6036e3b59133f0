"""Model FLOPs are those of closed forms, however a program loops, branches, calls or recomputes."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from runs import ROOT

import jddp
from jddp.ground.jaxprs import equations
from jddp.inspection.flops import PEAKS, count_flops, count_inside, seconds_at_peak, uncounted
from jddp.zoo.losses import cross_entropy, next_token
from jddp.zoo.models import MODELS

sys.path.append(str(ROOT / "benchmarks"))
from gpu_jobs import JOBS, SMOKE_JOBS

F32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
X, W = F32((2, 3)), F32((3, 3))


def forward(function, *shapes):
    return count_inside(jax.make_jaxpr(function)(*shapes).jaxpr)


def pullback_of(function, *shapes):
    """The program of a backward pass, which is traced inside the trace of the forward pass."""
    traced = []

    def run(*arrays):
        results, pullback = jax.vjp(function, *arrays)
        traced.append(jax.make_jaxpr(pullback)(results).jaxpr)
        return results

    jax.eval_shape(run, *shapes)
    return traced[0]


def backward(function, *shapes):
    return count_inside(pullback_of(function, *shapes))


def test_products_are_counted_by_the_dtype_of_their_factors():
    once = 2 * 2 * 3 * 3
    assert forward(jnp.matmul, X, W) == {"tf32": once}
    assert forward(functools.partial(jnp.matmul, precision="highest"), X, W) == {"float32": once}
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    assert forward(jnp.matmul, half(X.shape), half(W.shape)) == {"bfloat16": once}
    whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    assert forward(jnp.matmul, whole(X.shape), whole(W.shape)) == {}
    assert forward(lambda x: x + np.ones((3, 3)) @ jnp.ones((3, 3)), W) == {}  # of constants
    many = functools.partial(jnp.einsum, "bij,bjk->bik")
    assert forward(many, F32((5, 2, 3)), F32((5, 3, 4))) == {"tf32": 2 * 5 * 2 * 3 * 4}


def test_a_loop_counts_times_its_length_and_a_branch_as_its_most_expensive_one():
    once = 2 * 2 * 3 * 3

    def looped(x, w):
        return jax.lax.scan(lambda y, _: (jax.jit(jnp.matmul)(y, w), y), x, None, length=5)

    def branched(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)

    def unknown(x, w):
        return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y @ w, x)

    assert forward(looped, X, W).total() == 5 * once
    assert backward(looped, X, W).total() == 2 * 5 * once
    assert forward(branched, X, W).total() == 2 * once
    assert forward(unknown, X, W).total() == once


@pytest.mark.parametrize("is_scanned", [False, True])
def test_what_the_backward_pass_computes_again_is_not_counted(is_scanned):
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def model(layer, x, w):
        if is_scanned:
            return jax.lax.scan(lambda y, _: (layer(y, w), None), x, None, length=3)[0]
        return layer(layer(layer(x, w), w), w)

    kept = functools.partial(model, layer)
    again = functools.partial(model, jax.checkpoint(layer))
    assert len([*equations(pullback_of(kept, X, W))]) < len([*equations(pullback_of(again, X, W))])
    assert backward(again, X, W) == backward(kept, X, W) == {"tf32": 2 * 6 * 2 * 2 * 3 * 3}


CONVOLUTIONS = [("SAME", 1, 1), ("VALID", 2, 1), ("SAME", 2, 4)]


@pytest.mark.parametrize("padding, stride, groups", CONVOLUTIONS)
def test_both_gradients_of_a_convolution_cost_as_much_as_itself(padding, stride, groups):
    def convolve(x, kernel):
        numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
        return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, padding, **numbers)

    x, kernel = F32((2, 12, 12, 4)), F32((3, 3, 4 // groups, 8))
    _, *places, _ = jax.eval_shape(convolve, x, kernel).shape
    want = 2 * 2 * places[0] * places[1] * 3 * 3 * (4 // groups) * 8
    assert forward(convolve, x, kernel).total() == want
    assert backward(convolve, x, kernel).total() == 2 * want


def test_the_attention_of_cudnn_costs_as_much_as_its_products(monkeypatch):
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)

    def attend(implementation, *arrays):
        return jax.nn.dot_product_attention(*arrays, implementation=implementation)

    arrays = [jax.ShapeDtypeStruct((2, 64, 3, 8), jnp.bfloat16)] * 3
    for count in (forward, backward):
        ours, products = (
            count(functools.partial(attend, name), *arrays) for name in ("cudnn", "xla")
        )
        assert ours.total() == products.total() > 0


def planned(job, rows, mesh=1, model=(), **options):
    """The plan of a job of the benchmarks, of a model of the zoo."""
    whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    batch, loss = {"tokens": whole((rows, job.units_per_row + 1))}, next_token
    if job.image_size:
        image = F32((rows, job.image_size, job.image_size, 3))
        batch, loss = {"image": image, "label": whole((rows,))}, cross_entropy
    if "strategy" in options and loss is next_token:  # Logical replicas refuse tiles.
        loss = functools.partial(next_token, tile_size=None)
    network = MODELS[job.model](**job.sizes, **dict(model))
    ddp = jddp.DataParallel(network, optax.sgd(0.1), loss, mesh=mesh, **options)
    return ddp.steps, ddp.steps.planned(batch).traced


LOGICAL = {"mesh": 2, "strategy": jddp.LogicalReplicas(4), "accumulate_steps": 2}
STRATEGIES = {"fsdp": {"model": {"remat": True}, "mesh": 2, "strategy": "fsdp"}, "logical": LOGICAL}


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_a_step_has_the_same_model_flops_with_any_strategy(options):
    job = SMOKE_JOBS["gpt2_124m"]
    steps, traced = planned(job, rows=8, **options)
    assert count_flops(traced).total() * steps.rows.num_micro_batches == 8 * job.flops_per_row()
    assert uncounted(traced) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_model_flops_are_those_of_the_closed_form(name):
    job = JOBS[name]  # whose closed forms test_benchmarks.py compares with published figures
    _, traced = planned(job, rows=2)
    once = count_inside(traced.forward.jaxpr).total()
    again = count_inside(traced.backward).total()
    assert once + again == pytest.approx(2 * job.flops_per_row(), rel=0.01)
    # All but the gradient of the first layer's inputs, which nobody needs. GPT-2's forward pass has
    # the three products of the loss.
    head = 2 * 2 * job.sizes["vocab_size"] * 768 * 1024 if name == "gpt2_124m" else 0
    assert again + 2 * head == pytest.approx(2 * (once - 2 * head), rel=0.02)


def test_peak_rates_are_of_gpus_by_their_own_names():
    assert seconds_at_peak({"bfloat16": 312e12, "tf32": 156e12}, "NVIDIA A100-SXM4-80GB") == 2
    for kind, device in (("bfloat16", "Tesla T4"), ("float64", "NVIDIA B200"), ("tf32", "cpu")):
        assert seconds_at_peak({kind: 1.0}, device) is None
    assert all(name.startswith(("NVIDIA ", "Tesla ")) for name in PEAKS)
    for bfloat16, float16, tf32, float32 in PEAKS.values():
        assert bfloat16 in (0, float16)
        assert float16 > tf32 >= float32
