"""PyTorch DDP's cases of numerical equality (NUM) and of buckets (BKT): see docs/ddp_cases.md."""

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from judge import WIDTH, Net, beside_one_device, in_both_places, make_rows, sent, start, wrapped
from states import assert_same
from tiny import Of

from jddp.checkpoint.checkpoints import Checkpoints

KIB = 1 / 1024


@pytest.mark.parametrize("bucket_mb, num_buckets", [(25, 1), (0.001 * KIB, 4)])
def test_parameters_are_those_of_one_device_after_each_of_five_steps(bucket_mb, num_buckets):
    """NUM-1, NUM-2: another order of the rows in each step; one bucket, or one for each leaf."""
    orders = [np.random.default_rng(seed).permutation(16) for seed in range(5)]
    batches = [jax.tree.map(lambda x, order=order: x[order], make_rows()) for order in orders]
    ddp, _ = beside_one_device(Net(), batches=batches, bucket_mb=bucket_mb)
    assert len(ddp.plan) == num_buckets


def test_training_resumes_from_a_checkpoint_in_the_middle(tmp_path):
    """NUM-1, bitwise."""
    ddp = wrapped(Net())
    state, _ = ddp.step(start(ddp, make_rows()), make_rows())
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    _, restored, _ = checkpoints.restore(like=state)
    checkpoints.close()
    assert_same(restored, state)
    assert_same(ddp.step(restored, make_rows(seed=1))[0], ddp.step(state, make_rows(seed=1))[0])


@in_both_places
@pytest.mark.parametrize("rows, size", [(2, 2**15), (512, 2**10)])
def test_a_half_precision_gradient_is_finite_where_its_mean_is(place, rows, size):
    """NUM-4: float16 ends at 65504, and neither replicas nor rows may be added up beyond it."""
    batch = {"x": np.full(rows, size, np.float16)}
    options = {"mesh": 2, "optimizer": optax.sgd(1.0), **place}
    half = Of(lambda m, x: m.param("w", nn.initializers.zeros, (), jnp.float16) * x)
    ddp = wrapped(half, lambda m, b: m(b["x"]), **options)
    state, metrics = ddp.step(ddp.init(0, batch), batch)
    assert float(state.params["w"]) == -size
    assert float(metrics["loss"]) == 0


class Conv(nn.Module):
    dtypes: tuple[str, str]

    @nn.compact
    def __call__(self, x):
        first, last = map(jnp.dtype, self.dtypes)
        x = nn.Conv(2, (2, 2), param_dtype=first, dtype=first)(x.reshape(-1, 2, 2, 1))
        return nn.Dense(1, param_dtype=last, dtype=last)(x.mean((1, 2)))[:, 0].astype(jnp.float32)


@pytest.mark.parametrize(
    "first, last, bucket_mb, place",
    [
        ("float32", "float32", 1 / 2**20, "flat-ready"),
        ("float16", "float32", 1 / 2**20, "flat-ready"),
        ("float16", "float16", 25, "leaf-end"),
    ],
)
def test_a_conv_net_of_any_dtypes_equals_one_device_with_any_buckets(first, last, bucket_mb, place):
    """NUM-5: three steps."""
    batches = [make_rows(seed=seed) for seed in range(3)]
    # A replica rounds its share's gradient to eleven bits, one device that of all rows: 2^-8.
    rtol = 1e-5 if first == last == "float32" else 2**-8
    options = {"rtol": rtol, "bucket_mb": bucket_mb, "places": [place]}
    _, state = beside_one_device(Conv((first, last)), batches=batches, **options)
    assert state.params["Conv_0"]["kernel"].dtype == first
    assert state.params["Dense_0"]["kernel"].dtype == last


@in_both_places
@pytest.mark.parametrize("replicas", [1, 8])
def test_a_weight_that_is_used_twice_has_the_sum_of_both_gradients(place, replicas):
    """NUM-7: replica r sees r + 1, so that the mean is (R + 1) / 2, and twice that is R + 1."""

    def twice(m, x):
        w = m.param("w", nn.initializers.zeros, ())
        return w * x + w * x

    batch = {"x": np.arange(1, replicas + 1, dtype=np.float32)}
    options = {"mesh": replicas, "optimizer": optax.sgd(1.0), **place}
    ddp = wrapped(Of(twice), lambda m, b: m(b["x"]), **options)
    state, _ = ddp.step(ddp.init(0, batch), batch)
    assert float(state.params["w"]) == -(replicas + 1)


def sizes(ddp):
    return [bucket.bytes for bucket in ddp.plan.buckets]


class Layers(nn.Module):
    dtypes: tuple[str, ...]
    used: int | None = None

    @nn.compact
    def __call__(self, x):
        for i, dtype in enumerate(self.dtypes):
            y = nn.Dense(WIDTH, use_bias=False, param_dtype=dtype, name=f"layer_{i}")(x)
            x = nn.tanh(y) if self.used is None or i < self.used else x
        return x.sum(-1)


def test_caps_are_taken_in_order_and_the_last_repeats():
    """BKT-6: as the step sends them."""
    for caps, want in (
        ([64], [64] * 5),
        ([64, 128], [64, 128, 128]),
        ([128, 64], [128, 64, 64, 64]),
        ([64, 128, 256], [64, 128, 128]),
        ([1, 1, 1000], [64, 64, 192]),
    ):
        ddp = wrapped(Layers(("float32",) * 5), bucket_mb=[cap / 2**20 for cap in caps])
        start(ddp, make_rows())
        assert sizes(ddp) == want


def test_caps_hold_also_before_a_batch_was_seen():
    """BKT-6: at initialisation, where the order is a guess."""

    class Nnx(nnx.Module):
        def __init__(self):
            self.w = nnx.List([nnx.Param(jnp.ones(16)) for _ in range(5)])

    ddp = wrapped(Nnx(), bucket_mb=[64 / 2**20, 128 / 2**20])
    ddp.init(0)
    assert sizes(ddp) == [64, 128, 128]


def test_bucket_sizes_of_two_dtypes_are_those_computed_by_hand():
    """BKT-7: kernels of 64 and of 32 bytes, last first, a cap of 100."""
    dtypes = ("float32", "float32", "bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16")
    ddp = wrapped(Layers(dtypes), bucket_mb=100 / 2**20)
    start(ddp, make_rows())
    got = [(b.dtype.name, b.bytes, [int(p[6]) for p in b.paths]) for b in ddp.plan.buckets]
    want = [("bfloat16", 96, [6, 5, 4]), ("float32", 64, [3]), ("bfloat16", 32, [2])]
    assert got == [*want, ("float32", 64, [1]), ("float32", 64, [0])]


def test_a_bucket_of_unused_parameters_is_not_sent():
    """BKT-8: one all-reduce where there were two; parameters as on one device."""
    small = 2  # the loss and its count
    for used, want in ((1, [small, 16]), (2, [small, 16, 16])):
        model = Layers(("float32",) * 2, used=used)
        ddp = wrapped(model, bucket_mb=64 / 2**20, **judge.PLACES["flat-ready"])
        assert sorted(x.num_elements for x in sent(ddp)) == want
    beside_one_device(Layers(("float32",) * 2, used=1), places=["flat-ready"])
