"""PyTorch DDP's cases of numerical equality (NUM) and of buckets (BKT): see README.md here."""

import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from judge import WIDTH, beside_one_device, in_both_places, joined, make_rows, sent, wrapped
from tiny import Of

import jddp


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
    """BKT-6: as the step sends them, and at initialisation, where the order is a guess."""

    class Nnx(nnx.Module):
        def __init__(self):
            self.w = nnx.List([nnx.Param(jnp.ones(16)) for _ in range(5)])

    for caps, want in (
        ([64], [64] * 5),
        ([64, 128], [64, 128, 128]),
        ([128, 64], [128, 64, 64, 64]),
        ([64, 128, 256], [64, 128, 128]),
        ([1, 1, 1000], [64, 64, 192]),
    ):
        for model, batch in ((Layers(("float32",) * 5), make_rows()), (Nnx(), None)):
            ddp = wrapped(model, reduction=jddp.Reduction(bucket_mb=[cap / 2**20 for cap in caps]))
            ddp.init(0, batch)
            assert [bucket.bytes for bucket in ddp.plan.buckets] == want


def test_bucket_sizes_of_two_dtypes_are_those_computed_by_hand():
    """BKT-7: kernels of 64 and of 32 bytes, last first, a cap of 100."""
    dtypes = ("float32", "float32", "bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16")
    ddp = wrapped(Layers(dtypes), reduction=jddp.Reduction(bucket_mb=100 / 2**20))
    plan = ddp.steps.planned(make_rows()).plan
    got = [(b.dtype.name, b.bytes, [int(p[6]) for p in b.paths]) for b in plan.buckets]
    want = [("bfloat16", 96, [6, 5, 4]), ("float32", 64, [3]), ("bfloat16", 32, [2])]
    assert got == [*want, ("float32", 64, [1]), ("float32", 64, [0])]


def test_a_bucket_of_unused_parameters_is_not_sent():
    """BKT-8: one all-reduce where there were two; parameters as on one device."""
    small = 2  # the loss and its count
    for used, want in ((1, [small, 16]), (2, [small, 16, 16])):
        model = Layers(("float32",) * 2, used=used)
        ddp = wrapped(
            model,
            **joined(judge.PLACES["flat-ready"], reduction=jddp.Reduction(bucket_mb=64 / 2**20)),
        )
        assert sorted(x.num_elements for x in sent(ddp)) == want
    beside_one_device(Layers(("float32",) * 2, used=1), places=["flat-ready"])
