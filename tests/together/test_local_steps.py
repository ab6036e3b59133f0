"""Replicas that step alone and synchronize now and then: held to as many models on one device."""

import itertools

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import REPLICAS, Half, Net, assert_close, host, make_rows, sent, squares, start, wrapped
from oracle import mean_over_valid
from states import assert_same
from tiny import ConvNet, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import Checkpoints
from jddp.checkpoint.export import export
from jddp.engine.digest import digests, find_divergence
from jddp.engine.sync import EveryStep
from jddp.errors import ConfigError, UsageError
from jddp.job.job import build
from jddp.trainer.resume_notes import differences
from jddp.zoo.losses import cross_entropy
from jddp.zoo.models.cnn import CNN

DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)
# Sums of four rows, and of four replicas, in another order, over some steps.
ROUNDING = 1e-5


def local(every=3, **options):
    return {"local_steps": jddp.LocalSteps(every, **options)}


def begin(ddp, batch=None, model=None):
    """A first state with the numbers of `judge.start`, the same for all."""
    params = start(wrapped(model or Net()), make_rows()).params
    return ddp.init(0, make_rows() if batch is None else batch, params={"params": host(params)})


def taken(batches, model=None, **options):
    """The state after each of the batches, on the host, and the metrics; and the wrapper."""
    ddp = wrapped(model or Net(), donate=False, **options)
    state, states, reported = begin(ddp, batches[0], model), [], []
    for batch in batches:
        state, metrics = ddp.step(state, batch)
        states.append(state)
        reported.append(host(metrics))
    return ddp, states, reported


def mean_of(tree):
    return jax.tree.map(lambda x: x.mean(0), host(tree))


def assert_meet(state, num=REPLICAS):
    for rows in jax.tree.leaves(host(state.params)):
        assert len(rows) == num
        assert (rows == rows[0]).all()


def batches_of(num, rows=16):
    return [make_rows(rows, seed=i) for i in range(num)]


def unevenly_masked(batches):
    """Replicas of 4, 3 and 2 valid rows, and one that now and then has none."""
    masks = [[1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, *([i % 2] * 4)] for i in range(len(batches))]
    return [b | {"mask": np.array(m, np.float32)} for b, m in zip(batches, masks, strict=True)]


def share_of(batch, r, num=REPLICAS):
    return jax.tree.map(lambda x: np.split(np.asarray(x), num)[r], batch)


def by_hand(batches, optimizer, plan, *, clip=None, num=REPLICAS):
    """As many models of Flax as there are replicas, each with its own rows and optimizer."""

    @jax.jit
    def gradient(params, rows):
        def loss(params):
            losses = nn.apply(lambda m: squares(m, rows), Net())({"params": params})
            return mean_over_valid(losses, rows.get("mask"))

        return jax.grad(loss)(params)

    def clipped(grads):
        return grads if clip is None else clip.update(grads, clip.init(grads))[0]

    def moved(new, old, moves):
        is_own = [jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(new)]
        leaves = zip(jax.tree.leaves(new), jax.tree.leaves(old), is_own, strict=True)
        kept = [a if moves or not own else b for a, b, own in leaves]
        return jax.tree.unflatten(jax.tree.structure(new), kept)

    first = host(start(wrapped(Net()), make_rows()).params)
    own = [(first, optimizer.init(first)) for _ in range(num)]
    together, outer_state = first, plan.outer.init(first)
    for step, batch in enumerate(batches, start=1):
        shares = [share_of(batch, r, num) for r in range(num)]
        for r, (params, opt_state) in enumerate(own):
            is_shared = step <= plan.start
            rows = batch if is_shared else shares[r]
            moves = is_shared or rows.get("mask", np.ones(1)).sum() > 0
            zeros = jax.tree.map(np.zeros_like, params)
            grads = clipped(gradient(params, rows)) if moves else zeros
            updates, new = optimizer.update(grads, opt_state, params)
            own[r] = moved((optax.apply_updates(params, updates), new), own[r], moves)
        if step <= plan.start:
            together = own[0][0]
        elif (step - plan.start) % plan.every == 0:
            mean = jax.tree.map(lambda *x: np.mean(x, 0, np.float64), *(p for p, _ in own))
            apart = jax.tree.map(lambda a, b: (a - b).astype(np.float32), together, mean)
            updates, outer_state = plan.outer.update(apart, outer_state, together)
            together = optax.apply_updates(together, updates)
            own = [(together, opt_state) for _, opt_state in own]
    return own, {"params": together, "opt_state": outer_state}


def assert_as_by_hand(batches, optimizer, clip=None, **options):
    plan = options["local_steps"]
    ddp, states, reported = taken(batches, optimizer=optimizer, **options)
    state = states[-1]
    own, outer = by_hand(batches, optimizer, plan, clip=clip)
    stacked = jax.tree.map(lambda *x: np.stack(x), *own)
    params, opt_state = host((state.params, state.opt_state))
    assert_close(params, host(stacked[0]), rtol=ROUNDING)
    # Whole numbers are the same on all replicas, which have one of them.
    opt_state = jax.tree.map(lambda a, b: np.broadcast_to(a, b.shape), opt_state, stacked[1])
    assert_close(opt_state, host(stacked[1]), rtol=ROUNDING)
    assert_close(host(state.comm_state.outer), host(outer), rtol=ROUNDING)
    return ddp, states, reported


CASES = {
    "averaging": (optax.sgd(0.1), {}),
    "averaging under momentum": (optax.sgd(0.1, momentum=0.9), {}),
    "post-local": (optax.sgd(0.1, momentum=0.9), {"start": 2}),
    "diloco": (optax.adamw(1e-2), {"outer": DILOCO}),
    "diloco after plain steps": (optax.adamw(1e-2), {"outer": DILOCO, "start": 1}),
}


@pytest.mark.parametrize("optimizer, options", CASES.values(), ids=CASES)
def test_replicas_are_models_on_one_device_each_that_synchronize(optimizer, options):
    _, states, _ = assert_as_by_hand(batches_of(8), optimizer, **local(**options))
    begins = options.get("start", 0)
    for step, state in enumerate(states, start=1):
        rows = np.asarray(state.params["first"]["kernel"])
        meet = step <= begins or (step - begins) % 3 == 0
        assert (rows == rows[0]).all() == meet, step


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)])
def test_each_divides_by_its_own_valid_rows_and_waits_where_it_has_none(optimizer):
    assert_as_by_hand(unevenly_masked(batches_of(5)), optimizer, **local(start=1, outer=DILOCO))


@pytest.mark.parametrize("start, accumulate_steps", [(0, 2), (2, 1), (2, 2)])
def test_micro_batches_and_buckets_that_leave_when_they_are_ready_make_no_difference(
    start, accumulate_steps
):
    options = {"accumulate_steps": accumulate_steps, "layout": "flat", "overlap": True}
    options |= local(2, start=start)
    ddp, *_ = assert_as_by_hand(batches_of(5), optax.sgd(0.1), **options)
    assert ("optimization_barrier" in ddp.lower(make_rows()).as_text()) == (start > 0)


def test_each_clips_its_own_gradient_and_reports_the_mean_of_norms():
    batches, options = batches_of(4), {"max_grad_norm": 0.5, **local()}
    limit = optax.clip_by_global_norm(0.5)
    *_, reported = assert_as_by_hand(batches, optax.sgd(0.1), clip=limit, **options)
    one = wrapped(Net(), mesh=1, max_grad_norm=0.5)
    shares = [share_of(batches[0], r) for r in range(REPLICAS)]
    norms = [float(one.step(begin(one), share)[1]["grad_norm"]) for share in shares]
    np.testing.assert_allclose(reported[0]["grad_norm"], np.mean(norms), rtol=ROUNDING)


def test_local_steps_of_one_are_data_parallel_sgd():
    batches, sgd = batches_of(4), optax.sgd(0.1)
    _, states, reported = taken(batches, optimizer=sgd, **local(1))
    _, plain, wanted = taken(batches, optimizer=sgd)
    assert_close(reported, wanted, rtol=ROUNDING)
    assert_close(mean_of(states[-1].params), host(plain[-1].params), rtol=ROUNDING)
    assert_meet(states[-1])


@pytest.mark.parametrize("begins, same", [(0, 0), (2, 2), (100, 4)])
def test_steps_before_the_start_equal_plain_ones_bitwise_where_arithmetic_is_exact(begins, same):
    """HK-6, post-local: with the start in range and out of it."""
    # Replicas have 4, 2, 1 and 1 valid rows: their mean count is a power of two, as are the rates.
    mask = np.array([1, 1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0], np.float32)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-2, 3, (4, 16, n)).astype(np.float32) for n in (4, 1))
    batches = [{"x": a, "y": b[:, 0], "mask": mask} for a, b in zip(x, y, strict=True)]
    options = {"optimizer": optax.sgd(2**-4, momentum=0.5), "donate": False}
    # It begins with whole numbers.
    line = Of(lambda m, x: nn.Dense(1, kernel_init=nn.initializers.ones)(x)[:, 0])

    def states(**more):
        ddp = wrapped(line, **options, **more)
        first = ddp.init(0, batches[0])
        return itertools.accumulate(batches, lambda s, b: ddp.step(s, b)[0], initial=first)

    pairs = zip(states(**local(start=begins)), states(), strict=True)
    for step, (got, want) in enumerate(pairs):
        got, want = host((got.params, got.opt_state)), host((want.params, want.opt_state))
        alike = [(a == b).all() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)]
        assert all(alike) == (step <= same), step


@pytest.mark.parametrize("begins", [0, 3, 100])
def test_what_replicas_move_by_on_the_mean_is_that_of_plain_steps(begins):
    """HK-6, AVG-1: gradients do not depend on parameters here, so that means are exact."""
    batch = {"x": np.repeat(np.arange(4, dtype=np.float32), 2)}
    options = {"optimizer": optax.sgd(1.0), **local(2, start=begins)}
    ddp = wrapped(judge.Plane(), lambda model, batch: model(batch["x"]), **options)
    state = ddp.init(0, batch)
    for step in range(1, 11):
        state, _ = ddp.step(state, batch)
        rows = np.asarray(state.params["w"])[:, 0, 0]
        assert rows.mean() == -1.5 * step
        meet = step <= begins or (step - begins) % 2 == 0
        last = 1.5 if meet else np.arange(4)
        np.testing.assert_array_equal(-rows, 1.5 * (step - 1) + last)


@pytest.mark.parametrize(
    "options, num_numbers", [({}, 2), ({"max_grad_norm": 1.0, "skip_nonfinite": True}, 4)]
)
@pytest.mark.parametrize("begins", [0, 9])
def test_between_outer_steps_travel_the_loss_and_its_count_and_a_number_for_each_option(
    options, num_numbers, begins
):
    found = sent(wrapped(Net(), **local(start=begins), **options))
    always = [x for x in found if x.num_runs is not None]
    assert sum(x.num_elements for x in always) == num_numbers
    sometimes = [("outer_step/" in x.op_name, x.num_elements) for x in found if x.num_runs is None]
    # Before the start gradients travel, in a branch of their own.
    assert sometimes == [(False, 25)] * (begins > 0) + [(True, 25)]


def test_differences_may_be_narrowed_for_the_way():
    ddp = wrapped(Net(), wire_dtype="bfloat16", layout="flat", **local())
    # As asked for: XLA:CPU adds in float32 what is bfloat16.
    assert "tensor<25xbf16>" in ddp.lower(make_rows()).as_text()
    before = host(begin(wrapped(Net())).params)
    moved = []
    for options in ({"wire_dtype": "bfloat16"}, {}):
        _, states, _ = taken(batches_of(3), optimizer=optax.sgd(0.1), **options, **local())
        moved.append(jax.tree.map(lambda x, b: x[0] - b, host(states[-1].params), before))
        assert_meet(states[-1])
    # Differences are rounded, each to eight bits, and parameters are not: 4 * 2^-8 of the largest.
    assert_close(*moved, rtol=2**-6)


def test_what_is_read_is_the_mean_of_the_replicas():
    options = {"ema_decay": 0.5, "optimizer": optax.sgd(0.1), **local()}
    batches = batches_of(4)
    ddp, states, _ = taken(batches, **options)
    state = states[-1]
    mean = mean_of(state.params)
    assert_close(host(ddp.model(state)["params"]), mean, rtol=1e-6)
    plain = wrapped(Net())
    alone = plain.init(0, batches[0], params={"params": mean})
    got, want = ddp.evaluate(state, batches), plain.evaluate(alone, batches)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=ROUNDING)
    ways = ((ddp, state), (plain, alone))
    got, want = (x.predict(s, batches, lambda m, b: m(b["x"])) for x, s in ways)
    assert_close(got, want, rtol=ROUNDING)
    norm = ddp.diagnose(state, batches[0])["first/kernel"]["parameter"]
    np.testing.assert_allclose(norm, np.linalg.norm(mean["first"]["kernel"]), rtol=1e-6)
    # The moving average of the mean is the mean of moving averages.
    average = host(begin(wrapped(Net())).params)
    for seen in states:
        average = jax.tree.map(lambda a, x: 0.5 * a + 0.5 * x, average, mean_of(seen.params))
    assert_close(host(ddp.model(state, "ema")["params"]), average, rtol=1e-6)


def test_gradients_are_those_of_the_global_batch():
    got, want = (wrapped(Net(), **options) for options in (local(), {}))
    got, want = (ddp.gradients(begin(ddp), make_rows()) for ddp in (got, want))
    assert_close(host(got), host(want), rtol=ROUNDING)


def broken_rows(**options):
    rows = make_rows(**options)
    rows["x"][-1] = np.nan  # of the last replica alone
    return rows


def test_a_step_that_is_not_finite_is_left_out_by_all_and_not_counted():
    batches = batches_of(5)
    broken = broken_rows(seed=2)
    options = {"skip_nonfinite": True, **local()}
    _, states, reported = taken([*batches[:2], broken, *batches[2:]], **options)
    _, wanted, _ = taken(batches, **options)
    assert [x["skipped"] for x in reported] == [0, 0, 1, 1, 1, 1]
    # The third step that is taken is the fourth: there they synchronize. Keys differ, unused.
    for got, want in zip([*states[:2], *states[3:]], wanted, strict=True):
        assert_same(*((x.params, x.opt_state, x.comm_state) for x in (got, want)))
    assert_meet(states[3])


def test_an_optimizer_that_counts_what_it_sees_in_gradients_is_found_out():
    optimizer = optax.apply_if_finite(optax.sgd(0.1), 3)
    _, states, _ = taken([make_rows(), broken_rows()], optimizer=optimizer, **local())
    clean, reported = (find_divergence(np.asarray(digests(s)), s) for s in states)
    assert clean is None
    assert reported.startswith("opt_state/notfinite_count differs on replica 3")


@pytest.mark.parametrize("policy", ["zero", "skip"])
def test_unused_parameters_follow_their_policy(policy):
    optimizer = optax.adamw(1e-2, weight_decay=0.5)
    options = {"unused_parameters": policy, "optimizer": optimizer, **local(2, outer=DILOCO)}
    _, states, _ = taken(batches_of(4), model=Half(), **options)
    first = np.asarray(start(wrapped(Half()), make_rows()).params["unused"]["kernel"])
    rows = np.asarray(states[-1].params["unused"]["kernel"])
    assert (rows == rows[0]).all()
    assert (rows[0] == first).all() == (policy == "skip")


def means(state):
    return np.asarray(state.model_state["batch_stats"]["BatchNorm_0"]["mean"])


def of_images(**options):
    return jddp.DataParallel(ConvNet(), optax.sgd(0.1), loss_fn, mesh=2, **options)


@pytest.mark.parametrize("mode", ["sync", "broadcast"])
def test_statistics_on_which_replicas_would_agree_in_each_step_are_refused(mode):
    ddp = of_images(batch_norm=mode, **local())
    with pytest.raises(ConfigError, match=r"agree on 'batch_stats/.*batch_norm='local'"):
        ddp.init(0, make_batch())


def test_statistics_of_ones_own_go_with_it():
    ddp = of_images(batch_norm="local", **local(2))
    state, _ = take_steps(ddp, [make_batch(seed=i) for i in range(4)])
    assert len(np.unique(means(state), axis=0)) == 2
    assert [x.num_elements for x in sent(ddp, make_batch()) if x.num_runs == 1] == [4]
    assert 0 <= ddp.evaluate(state, [make_batch()])["accuracy"] <= 1


def test_what_does_not_go_with_it_is_refused():
    hook = jddp.CommHook(lambda p: (), lambda b, s, a: (b, s))
    for options, reported in (
        (lambda: local(0), "every is at least 1 and start at least 0; got every=0"),
        (lambda: local(start=-1), "got every=3, start=-1"),
        (lambda: {"shard_optimizer": True, **local()}, "Leave one out"),
        (lambda: {"comm_hook": hook, **local()}, "reduces gradients in each step.*Leave one out"),
    ):
        with pytest.raises(ConfigError, match=reported):
            wrapped(Net(), **options())
    with pytest.raises(UsageError, match="leave it out of verify"):
        jddp.verify(Net(), optax.sgd(0.1), squares, make_rows(), **local())


def test_a_run_that_stops_between_outer_steps_resumes_bitwise(tmp_path):
    def train(num_steps, run_dir):
        options = {"ema_decay": 0.9, **local(outer=DILOCO, start=1)}
        ddp = wrapped(Net(), optimizer=optax.adam(1e-2), **options)
        every = {"check_replicas_every_steps": 1, "log_every_steps": 1}
        return ddp.fit(batches_of(8), num_steps=num_steps, run_dir=run_dir, **every)

    want = train(8, tmp_path / "whole")
    for num_steps in (3, 6, 8):  # outer steps are after 4 and 7
        got = train(num_steps, tmp_path / "broken")
    assert_same(got.state, want.state)


@pytest.mark.parametrize("num", [3, 8])
def test_on_another_number_of_replicas_each_begins_with_the_mean(tmp_path, num):
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), **local(outer=DILOCO)}
    ddp, states, _ = taken(batches_of(4, rows=24), **options)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(4, states[-1], {"world": ddp.steps.topology}, ddp.steps.layouts(states[-1]))
    checkpoints.close()
    other = wrapped(Net(), mesh=num, **options)
    like = begin(other, make_rows(24))
    state = checkpoints.restore(like, other.steps.layouts(like)).state
    for field in ("params", "opt_state"):
        saved, got = host((getattr(states[-1], field), getattr(state, field)))
        for a, b in zip(*map(jax.tree.leaves, (got, saved)), strict=True):
            np.testing.assert_allclose(a, np.broadcast_to(b.mean(0), a.shape), rtol=1e-5, atol=1e-7)
    assert_close(host(state.comm_state), host(states[-1].comm_state), rtol=0)
    facts = {"uses_rng": False, "has_statistics": False}
    reported = differences(ddp.steps.topology, other.steps.topology, **facts)
    assert "each replica begins with the mean of the previous ones" in reported
    for i in (4, 5):
        state, _ = other.step(state, make_rows(24, seed=i))
    assert_meet(state, num)


def test_an_explanation_tells_what_travels_when():
    ddp = wrapped(Net(), bucket_mb=25, **local(16, start=100))
    reported = ddp.explain(make_rows())
    # Loss and count each step; twenty-five parameters each sixteenth; four bytes each.
    assert reported.bytes_per_step == 4 * (2 + 25 / 16)
    text = " ".join(str(reported).split())
    for part in (
        "Each of the first 100 steps sends gradients, as many bytes.",
        "Replicas synchronize every 16 steps. Differences of parameters then are 9.54e-05 MiB",
        "sent every 16 steps, and in each of the first 100",
        "parameters, in outer steps",
        "a ring of 4 devices moves",
    ):
        assert part in text
    assert max(map(len, str(reported).splitlines())) <= 80
    assert "sent every 16 steps" in str(ddp.plan)


def test_stats_count_the_parameters_of_one_replica():
    ddp = wrapped(Net(), **local(16))
    begin(ddp)
    reported = ddp.stats(make_rows())
    assert (reported["local_steps"], reported["wire_bytes"]) == (16, 100)
    assert reported["reduce_seconds"] > 0


def configured(**options):
    return jddp.Config(
        model={"name": "mlp", "kwargs": {"widths": [4]}},
        train={"num_steps": 2, "eval_every_steps": 2},
        data={"global_batch_size": 16},
        mesh={"num_devices": 4},
        checkpoint={"every_steps": 2},
        ddp={"local_steps": options},
    )


def test_a_config_describes_it():
    outer = {"learning_rate": 0.7, "kwargs": {"momentum": 0.9, "nesterov": True}}
    job = build(configured(every=16, start=3, outer=outer))
    plan = job.ddp.spec.sync
    assert (plan.every, plan.start) == (16, 3)
    params, grads = {"w": np.ones(2, np.float32)}, {"w": np.array([1.0, 2.0], np.float32)}
    for optimizer in (plan.outer, DILOCO):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        np.testing.assert_allclose(updates["w"], [-1.33, -2.66], rtol=1e-6)
    assert job.num_parameters == build(configured()).num_parameters
    assert type(build(configured()).ddp.spec.sync) is EveryStep


def test_mistakes_in_a_config_are_refused():
    for options, reported in (
        ({"start": 8}, "give 'every' too"),
        ({"every": 8, "outer": {"name": "sgdd"}}, "ddp.local_steps.outer.name.*Did you mean 'sgd'"),
        ({"every": 8, "outer": {"kwargs": {"momentun": 1}}}, "Did you mean 'momentum'"),
    ):
        with pytest.raises(ConfigError, match=reported):
            build(configured(**options))


def test_a_finished_run_is_read_as_the_mean_of_its_replicas(tmp_path):
    run = jddp.fit(configured(every=3), **{"run.dir": str(tmp_path / "run")})
    mean = mean_of(run.state.params)
    assert len(np.unique(np.asarray(jax.tree.leaves(run.state.params)[0]), axis=0)) == 4
    assert_close(host(jddp.load(tmp_path / "run").variables["params"]), mean, rtol=1e-6)
    export(tmp_path / "run/checkpoints/2", tmp_path / "weights.safetensors", ["params"])
    for path in (tmp_path / "run", tmp_path / "weights.safetensors"):
        job = build(configured())
        state = job.ddp.init(0, job.train_batches().batch(0), params=path)
        assert_close(host(state.params), mean, rtol=1e-6)


def test_a_replica_without_valid_rows_keeps_its_statistics():
    options = {"batch_norm": "local", "max_grad_norm": 1.0, "skip_nonfinite": True, **local(2)}
    ddp = jddp.DataParallel(CNN(widths=[4]), optax.sgd(0.1), cross_entropy, mesh=2, **options)
    batch = {
        "image": np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32),
        "label": np.arange(8, dtype=np.int32),
        "mask": np.repeat(np.array([1, 0], np.float32), 4),
    }
    state = ddp.init(0, batch)
    before = means(state)
    state, metrics = ddp.step(state, batch)
    after = means(state)
    assert (after == before).all(1).tolist() == [False, True]
    assert metrics["skipped"] == 0
    assert np.isfinite(metrics["grad_norm"])
