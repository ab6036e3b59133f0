"""PowerSGD: what travels, what arrives, what is remembered."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import P
from judge import REPLICAS, Net, beside_one_device, host, in_both_places, joined, make_rows, wrapped
from states import assert_same, copied
from sweeps import swept
from tiny import MLP, ConvNet, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.ground.errors import ConfigError
from jddp.inspection.hlo import collectives, read_program

SIDES = 8, 6


def powersgd(rank=1, start_step=0, min_compression_rate=1e-3, **options):
    """Of a rate that every matrix reaches, however small."""
    options |= {"start_step": start_step, "min_compression_rate": min_compression_rate}
    return jddp.powersgd(rank, **options)


class Linear(nn.Module):
    """A loss whose gradients are the rows themselves, wherever the parameters are."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.zeros, SIDES, self.dtype)
        b = self.param("b", nn.initializers.zeros, SIDES[1:], self.dtype)
        x = x.astype(self.dtype)
        return jnp.einsum("ij,bij->b", w, x) + x[:, 0] @ b


def matrices(num=16, *, seed=0):
    return np.random.default_rng(seed).normal(size=(num, *SIDES)).astype(np.float32)


def linear(hook, model=None, **options):
    options = joined(options, reduction=jddp.Reduction(hook=hook))
    options["optimizer"] = optax.sgd(1.0)
    return wrapped(model or Linear(), lambda m, b: m(b["x"]).astype(jnp.float32), **options)


def through(ddp, batches, state=None):
    return take_steps(ddp, batches, state)[0]


def one_step(x, hook, **options):
    """What a step makes of rows of gradients: the gradient of `w`."""
    return -host(through(linear(hook, **options), [{"x": x}]).params["w"])


@pytest.mark.parametrize(
    "options", swept([{}, {"accumulate_steps": 2}], every=2), ids=["once", "in parts"]
)
def test_of_full_rank_it_equals_one_device(options):
    """Three steps, so that what is remembered, which is rounding, has come back."""
    batches = [make_rows(seed=i) for i in range(3)]
    ddp, _ = beside_one_device(
        Net(), batches=batches, **joined(options, reduction=jddp.Reduction(hook=powersgd(rank=4)))
    )
    assert "hook 'powersgd'" in str(ddp.plan)


@in_both_places
def test_the_same_gradient_again_and_again_arrives_as_its_best_of_that_rank(place):
    """Power iteration: without error feedback it settles on the largest singular vectors."""
    x = matrices()
    u, _, v = np.linalg.svd(x.mean(0))
    sizes = np.array([8, 4, 2, 1, 0.5, 0])
    x += (u[:, :6] * sizes) @ v - x.mean(0)
    ddp = linear(powersgd(rank=2, error_feedback=False), **place)
    state = through(ddp, [{"x": x}] * 29)
    before = host(state.params["w"])
    state = through(ddp, [{"x": x}], state)
    got, best = before - host(state.params["w"]), (u[:, :2] * sizes[:2]) @ v[:2]
    # The third singular value is half of the second: 29 steps leave 2^-58 of it, and rounding.
    np.testing.assert_allclose(got, best, rtol=0, atol=1e-4)
    judge.assert_same_on_all_devices(state)


@pytest.mark.parametrize("rank, columns", [(1, 0), (1, 1), (2, 1), (3, 2), (6, 0), (6, 2)])
def test_a_gradient_of_lower_rank_arrives_whole_and_never_as_nan(rank, columns):
    rng = np.random.default_rng(1)
    left, right = rng.normal(size=(8, columns)), rng.normal(size=(columns, 6))
    x = (np.zeros((16, *SIDES), np.float32) + left @ right).astype(np.float32)
    # Columns of Q that are nearly alike cost digits: float32 and a condition of some hundreds.
    np.testing.assert_allclose(one_step(x, powersgd(rank)), x[0], atol=1e-4)


def test_after_steps_of_zeros_gradients_get_through():
    """Also those that stand where nothing that has been sent before has had anything."""
    early, late = np.zeros((2, 16, *SIDES), np.float32)
    early[:, :4, :3] = 1
    late[:, 4:, 3:] = 1
    ddp = linear(powersgd(error_feedback=False))
    state = through(ddp, [{"x": x} for x in (early, 0 * early, 0 * early, late, late)])
    # Twice the late one, or once where a step was needed to find it again.
    w = -host(state.params["w"])
    np.testing.assert_allclose(w[:4, :3], 1, rtol=1e-5)
    np.testing.assert_allclose(w[4:, 3:], w[4, 3], rtol=1e-5)
    assert w[4, 3] > 0.99
    np.testing.assert_array_equal(w[:4, 3:], 0)


def test_what_is_not_finite_leaves_no_trace_in_a_skipped_step():
    ddp, x = linear(powersgd(), skip_nonfinite=True), matrices()
    state = through(ddp, [{"x": x}])
    before, x = copied(state), x.copy()
    x[5, 2, 3] = np.nan
    state = through(ddp, [{"x": x}], state)
    assert int(state.skipped) == 1
    assert_same((state.params, state.comm_state.hook), (before.params, before.comm_state.hook))


def test_without_warm_start_each_step_looks_another_way_and_nothing_but_the_count_is_kept():
    """The same gradient three times, of which one column of Q sees another part each time."""
    x = matrices()
    ddp = linear(powersgd(error_feedback=False, warm_start=False))
    # What it draws is no random number of the model.
    assert not ddp.steps.planned({"x": x}).uses_rng
    state, ends = ddp.init(0, {"x": x}), []
    for _ in range(3):
        state = through(ddp, [{"x": x}], state)
        ends.append(host(state.params["w"]))
    steps = np.diff([0 * x[0], *ends], axis=0)
    assert (np.abs(np.diff(steps, axis=0)).max((1, 2)) > 1e-3).all()
    assert list(state.comm_state.hook) == ["step"]
    np.testing.assert_array_equal(state.comm_state.hook["step"], [3] * REPLICAS)


@in_both_places
@pytest.mark.parametrize("dtype, eps", [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_half_precision_parameters_keep_their_dtype_and_remember_in_float32(place, dtype, eps):
    x = matrices()
    state = through(linear(powersgd(6), model=Linear(dtype), **place), [{"x": x}])
    assert {a.dtype for a in jax.tree.leaves(state.params)} == {np.dtype(dtype)}
    assert {a.dtype.name for a in jax.tree.leaves(state.comm_state.hook)} == {"float32", "int32"}
    got = -host(state.params["w"]).astype(np.float32)
    np.testing.assert_allclose(got, x.mean(0), rtol=0, atol=10 * eps * np.abs(x).max())


class Complex(nn.Module):
    @nn.compact
    def __call__(self, x):
        z = self.param("z", nn.initializers.ones, SIDES, jnp.complex64)
        return jnp.einsum("ij,bij->b", z.real + 2 * z.imag, x)


def test_complex_gradients_travel_exactly():
    x = np.round(8 * matrices())
    plain, ours = (through(linear(hook, Complex()), [{"x": x}]) for hook in (None, powersgd()))
    assert list(ours.comm_state.hook["unsent"]) == []
    assert_same(ours.params, plain.params)


def bytes_by_bucket(ddp, batch):
    """Bytes of each gradient collective that the lowered step asks for, by its bucket."""
    found = collections.defaultdict(list)
    for x in collectives(read_program(ddp.steps.lower(batch).as_text("hlo", debug_info=True))):
        if bucket := re.search(r"\bbucket_(\d+)/", x.op_name):
            found[int(bucket[1])].append(x.bytes)
    return found


def promised(bucket, rank, rate):
    """The bytes of P with all that travels exactly, and of Q: r m and r n of each matrix."""
    first = second = 0
    for shape in bucket.shapes:
        m, n = math.prod(shape[:-1]), shape[-1]
        if len(shape) > 1 and rank * (m + n) * rate < m * n:
            first, second = first + rank * m, second + rank * n
        else:
            first += math.prod(shape)
    return [x * bucket.wire_dtype.itemsize for x in (first, second) if x]


@in_both_places
@pytest.mark.parametrize(
    "model, rank, rate, dtype",
    swept([(MLP(), 1, 2.0, None), (MLP(), 2, 1.0, "bfloat16"), (ConvNet(), 1, 1.0, None)], every=2),
    ids=["mlp", "narrow", "conv"],
)
def test_a_bucket_sends_its_factors_in_two_collectives(model, rank, rate, dtype, place):
    reduction = jddp.Reduction(
        bucket_mb=300 / 2**20, wire_dtype=dtype, hook=powersgd(rank, min_compression_rate=rate)
    )
    ddp = wrapped(model, loss_fn, **joined(place, reduction=reduction))
    found = bytes_by_bucket(ddp, make_batch())
    plan = ddp.steps.planned(make_batch()).plan
    assert len(plan) > 1 or isinstance(model, ConvNet)
    for index, bucket in enumerate(plan.buckets):
        assert sorted(found[index]) == sorted(promised(bucket, rank, rate))
    assert sum(map(sum, found.values())) < 0.9 * plan.wire_bytes  # convolutions of 36 numbers


def applied_and_unsent(state, factor=1.0):
    """The sum of all gradients that were applied, times a factor; and what is left to apply."""
    return -factor * host(state.params["w"]) + host(state.comm_state.hook["unsent"]["w"]).mean(0)


# Float32: some ten sums of numbers of up to thirty.
close = {"rtol": 0, "atol": 1e-4}


@in_both_places
@pytest.mark.parametrize("start_step, parts", swept([(0, 1), (3, 2)], every=2))
def test_what_was_applied_and_what_is_left_are_all_gradients(start_step, parts, place):
    """Whatever numbers of rows they come in."""
    ddp = linear(powersgd(start_step=start_step), accumulate_steps=parts, **place)
    x = [matrices(num, seed=i) for i, num in enumerate([16, 32, 16, 16, 32, 32, 16])]
    state = through(ddp, [{"x": a} for a in x])
    total = sum(a.mean(0) for a in x)
    np.testing.assert_allclose(applied_and_unsent(state), total, **close)
    assert np.abs(-host(state.params["w"]) - total).max() > 0.01
    np.testing.assert_allclose(-host(state.params["b"]), total[0], **close)


def test_masked_entries_count_where_what_is_left_is_weighed():
    mask, x = np.arange(16) % 2, [matrices(seed=i) for i in range(5)]
    state = through(linear(powersgd()), [{"x": a, "mask": mask} for a in x])
    total = sum(a[mask == 1].mean(0) for a in x)
    np.testing.assert_allclose(applied_and_unsent(state, 0.5), 0.5 * total, **close)


@pytest.mark.slow
def test_all_gradients_survive_8_replicas_that_become_4_and_8_again(tmp_path):
    x = [matrices(seed=i) for i in range(9)]
    checkpoints, state, seen = CheckpointFolder(tmp_path, keep=9), None, 0
    for size in (8, 4, 8):
        ddp = linear(powersgd(), mesh=size)
        if state is not None:
            saved, like = host(state.comm_state.hook), ddp.init(1, {"x": x[0]})
            layouts = ddp.steps.layouts(like)  # which no number of replicas changes
            checkpoints.save(seen, state, {}, layouts)
            state = checkpoints.restore(like, layouts).state
            hook = host(state.comm_state.hook)
            assert set(hook["step"]) == {seen}
            for a, b in zip(*map(jax.tree.leaves, (hook, saved)), strict=True):
                np.testing.assert_array_equal(a, np.broadcast_to(a[0], a.shape))
                np.testing.assert_allclose(a[0], b.mean(0), rtol=1e-6)  # eight sums of float32
        state = through(ddp, [{"x": a} for a in x[seen : seen + 3]], state)
        seen += 3
        total = sum(a.mean(0) for a in x[:seen])
        np.testing.assert_allclose(applied_and_unsent(state), total, **close)
    checkpoints.close()


def test_in_a_step_of_one_s_own_it_remembers_too():
    x = [matrices(8, seed=i) for i in range(4)]
    reduce = jddp.average_gradients("data", comm_hook=powersgd())

    def replica(rows):
        state, got = reduce.init({"w": rows[0, 0]}), jnp.zeros(SIDES)
        for row in rows:
            update, state = reduce.update({"w": row[0]}, state)
            got += update["w"]
        return got, state["unsent"]["w"][None]

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    specs = {"in_specs": P(None, "data"), "out_specs": (P(), P("data")), "check_vma": False}
    got, unsent = jax.jit(jax.shard_map(replica, mesh=mesh, **specs))(np.stack(x))
    np.testing.assert_allclose(got + unsent.mean(0), sum(x).mean(0), **close)


def test_options_that_mean_nothing_are_refused():
    for options in ({"rank": 0}, {"start_step": -1}, {"min_compression_rate": 0}):
        with pytest.raises(ConfigError, match="powersgd: got rank="):
            jddp.powersgd(**options)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_it_draws_the_same_whatever_kind_of_key_jax_makes(kind):
    hook, x = powersgd(2, error_feedback=False), matrices()
    with jax.default_prng_impl(kind):
        got = one_step(x, hook)
    np.testing.assert_array_equal(got, one_step(x, hook))
