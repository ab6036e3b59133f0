"""Replicas that step alone and synchronize now and then: held to as many models on one device."""

import itertools

import jax
import judge
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from judge import Net, assert_close, host, joined, make_rows, sent, squares, start, wrapped
from sweeps import swept
from test_random_options import hold_options
from tiny import ConvNet, Of, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.weights import export
from jddp.ground.errors import ConfigError, UsageError
from jddp.trainer.job.build import build

DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)
# Sums of four rows, and of four replicas, in another order, over some steps.
ROUNDING = 1e-5


def local(every=3, **options):
    return {"strategy": jddp.LocalSteps(every, **options)}


def begin(ddp, batch=None):
    """A first state with the numbers of `judge.start`, the same for all."""
    params = start(wrapped(Net()), make_rows()).params
    return ddp.init(0, make_rows() if batch is None else batch, params={"params": host(params)})


def taken(batches, **options):
    """The wrapper, and the state behind the batches."""
    ddp = wrapped(Net(), donate=False, **options)
    return ddp, take_steps(ddp, batches, begin(ddp, batches[0]))[0]


def mean_of(tree):
    return jax.tree.map(lambda x: x.mean(0), host(tree))


def assert_meet(state, num=judge.REPLICAS):
    for rows in jax.tree.leaves(host(state.params)):
        assert len(rows) == num
        assert (rows == rows[0]).all()


def batches_of(num, rows=16):
    return [make_rows(rows, seed=i) for i in range(num)]


READY = judge.PLACES["flat-ready"]
CASES = {
    "averaging": ("sgd", "no", local()),
    "post-local": ("sgd", "no", local(start=2)),
    "diloco": ("adamw", "no", local(outer=DILOCO)),
    "diloco after plain steps": ("adamw", "no", local(outer=DILOCO, start=1)),
    "empty replicas": ("adamw", "empty", local(outer=DILOCO, start=1)),
    "ready micro-batches": ("sgd", "token", {**READY, "accumulate_steps": 2, **local(2, start=2)}),
    "clipped": ("sgd", "no", {"max_grad_norm": 0.05, "skip_nonfinite": True, **local()}),
}


@pytest.mark.parametrize("optimizer, mask, options", swept(CASES, every=3))
def test_replicas_are_models_on_one_device_each_that_synchronize(optimizer, mask, options):
    """Each divides by its own valid rows, waits where it has none, and clips its own gradient."""
    how = {"num_steps": 8, "evaluates": False, "rtol": ROUNDING}
    hold_options(options, mask=mask, optimizer=optimizer, **how)


@pytest.mark.parametrize("begins, same", [(0, 0), (2, 2), (100, 4)])
def test_steps_before_the_start_equal_plain_ones_bitwise_where_arithmetic_is_exact(begins, same):
    """HK-6, post-local: with the start in range and out of it."""
    # Replicas have 4, 2, 1 and 1 valid rows: their mean count is a power of two, as are the rates.
    mask = np.array([1, 1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0], np.float32)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-2, 3, (4, 16, n)).astype(np.float32) for n in (4, 1))
    batches = [{"x": a, "y": b[:, 0], "mask": mask} for a, b in zip(x, y, strict=True)]
    # It begins with whole numbers.
    line = Of(lambda m, x: nn.Dense(1, kernel_init=nn.initializers.ones)(x)[:, 0])
    ends = []
    for more in (local(start=begins), {}):
        ddp = wrapped(line, optimizer=optax.sgd(2**-4, momentum=0.5), donate=False, **more)
        state = ddp.init(0, batches[0])
        states = itertools.accumulate(batches, lambda s, b, d=ddp: d.step(s, b)[0], initial=state)
        ends.append([host((s.params, s.opt_state)) for s in states])
    for step, pair in enumerate(zip(*ends, strict=True)):
        alike = [(a == b).all() for a, b in zip(*map(jax.tree.leaves, pair), strict=True)]
        assert all(alike) == (step <= same), step


@pytest.mark.parametrize(
    "begins, options, num", [(0, {}, 2), (9, {"max_grad_norm": 1.0, "skip_nonfinite": True}, 4)]
)
def test_between_outer_steps_travel_the_loss_and_its_count_and_a_number_for_each_option(
    begins, options, num
):
    found = sent(wrapped(Net(), **local(start=begins), **options))
    assert sum(x.num_elements for x in found if x.num_runs is not None) == num
    sometimes = [("outer_step/" in x.op_name, x.num_elements) for x in found if x.num_runs is None]
    # Before the start gradients travel, in a branch of their own, where each is ready.
    assert sometimes == [(False, 25)] * (begins > 0) + [(True, 25)]
    ready = READY if begins else {}
    narrow = wrapped(Net(), **joined(ready, local(start=begins), reduction="bfloat16"))
    text = narrow.steps.lower(make_rows()).as_text()
    assert ("optimization_barrier" in text) == (begins > 0)
    # As asked for: XLA:CPU adds in float32 what is bfloat16.
    assert "tensor<25xbf16>" in text


def test_what_is_read_is_the_mean_of_the_replicas():
    """Evaluation and the moving average beside local steps are in test_random_options."""
    batches = batches_of(4)
    ddp, state = taken(batches, optimizer=optax.sgd(0.1), **local())
    mean, plain = mean_of(state.params), wrapped(Net())
    alone = plain.init(0, batches[0], params={"params": mean})
    ways = ((ddp, state), (plain, alone))
    got, want = (x.predict(s, batches, lambda m, b: m(b["x"])) for x, s in ways)
    assert_close(got, want, rtol=ROUNDING)
    got, want = (host(x.gradients(begin(x), batches[0])) for x, _ in ways)
    assert_close(got, want, rtol=ROUNDING)
    norm = jddp.diagnose(ddp, state, batches[0])["first/kernel"]["parameter"]
    np.testing.assert_allclose(norm, np.linalg.norm(mean["first"]["kernel"]), rtol=1e-6)


def test_what_does_not_go_with_it_is_refused():
    def of_images(**options):
        tiny.wrapped(ConvNet(), **options, **local()).init(0, make_batch())

    agree = r"agree on 'batch_stats/.*batch_norm='local'"
    named = "ddp.strategy.outer.name.*Did you mean 'sgd'"
    for make, reported in (
        (lambda: local(0), "every is at least 1 and start at least 0; got every=0"),
        (lambda: local(start=-1), "got every=3, start=-1"),
        *((lambda x=x: of_images(batch_norm=x), agree) for x in ("sync", "broadcast")),
        (lambda: build(configured(start=8)), "local_steps needs 'every'"),
        (lambda: build(configured(every=8, outer={"name": "sgdd"})), named),
        (lambda: build(configured(every=8, outer={"kwargs": {"momentun": 1}})), "'momentum'"),
    ):
        with pytest.raises(ConfigError, match=reported):
            make()
    with pytest.raises(UsageError, match="verify without it"):
        jddp.verify(Net(), optax.sgd(0.1), squares, make_rows(), **local())


@pytest.mark.parametrize("num", swept([3, 8], every=2))
def test_on_another_number_of_replicas_each_begins_with_the_mean(tmp_path, num):
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), **local(outer=DILOCO)}
    ddp, old = taken(batches_of(4, rows=24), **options)
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    checkpoints.save(4, old, {"world": ddp.steps.topology}, ddp.steps.layouts(old))
    checkpoints.close()
    plain, file = wrapped(Net()), tmp_path / "weights.safetensors"
    export(tmp_path / "4", file, ["params"])
    for path in (tmp_path, file):
        read = plain.init(0, make_rows(), params=path)
        assert_close(host(read.params), mean_of(old.params), rtol=1e-6)
    other = wrapped(Net(), mesh=num, **options)
    like = begin(other, make_rows(24))
    state = checkpoints.restore(like, other.steps.layouts(like)).state
    for field in ("params", "opt_state"):
        saved, got = host((getattr(old, field), getattr(state, field)))
        for a, b in zip(*map(jax.tree.leaves, (got, saved)), strict=True):
            np.testing.assert_allclose(a, np.broadcast_to(b.mean(0), a.shape), rtol=1e-5, atol=1e-7)
    assert_close(host(state.comm_state), host(old.comm_state), rtol=0)
    for i in (4, 5):
        state, _ = other.step(state, make_rows(24, seed=i))
    assert_meet(state, num)


def test_an_explanation_tells_what_travels_when():
    ddp = wrapped(Net(), reduction=jddp.Reduction(bucket_mb=25), **local(16, start=100))
    reported = jddp.explain(ddp, make_rows())
    # Loss and count each step; twenty-five parameters each sixteenth; four bytes each.
    assert reported.bytes_per_step == 4 * (2 + 25 / 16)
    assert "parameters, in outer steps" in " ".join(str(reported).split())
    plan = ddp.steps.planned(make_rows()).plan
    assert "sent every 16 steps" in str(plan)
    assert plan.wire_bytes == 100  # of the parameters of one replica


def configured(**options):
    return jddp.Config(
        train={"num_steps": 2},
        data={"global_batch_size": 16},
        mesh={"num_devices": 4},
        ddp={"strategy": {"name": "local_steps", **options}},
    )
