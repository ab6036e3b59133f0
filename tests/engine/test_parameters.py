"""Awkward, frozen and averaged parameters: right on many devices, or refused with a reason."""

import functools

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
from judge import WIDTH, Net, beside_one_device, host, in_both_places, make_rows, start, wrapped
from states import close, equal
from sweeps import swept
from tiny import ConvNet, NnxConvNet, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.checkpoint.reader import read_arrays, read_newest
from jddp.checkpoint.weights import read_weights
from jddp.commands.runs import checkpoint_command as main
from jddp.engine.evaluation import optimizer_params
from jddp.engine.state import by_path
from jddp.ground.errors import ConfigError
from jddp.trainer.watching import KeepBest


def no_units(x):
    """NUM-10: a layer without elements."""
    return nn.Dense(0, kernel_init=nn.initializers.zeros, name="none")(x)


def of_complex(m, x):
    weights = m.param("complex", nn.initializers.normal(1.0), (WIDTH, 3), jnp.complex64)
    y = x.astype(jnp.complex64) @ weights
    return jnp.abs(y).sum(-1) + nn.Dense(1, name="real")(y.imag)[:, 0]


def mixed_dtypes(m, x):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = nn.tanh(nn.Dense(WIDTH, param_dtype=dtype, name=jnp.dtype(dtype).name)(x))
    return x.sum(-1)


def tied_embedding(m, x):
    table = nn.Embed(7, WIDTH)
    tokens = jnp.abs(3 * x).astype(jnp.int32) % 7
    return table.attend(nn.tanh(table(tokens)).mean(1)).sum(-1)


class TiedNnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last.kernel = self.first.kernel

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x))).sum(-1)


NO_PARAMETERS = Of(lambda m, x: x.sum(-1))
MODELS = {
    "one scalar": lambda: Of(lambda m, x: x.sum(-1) * m.param("w", nn.initializers.ones, ())),
    "a leaf without elements": lambda: Of(lambda m, x: Net()(jnp.append(x, no_units(x), -1))),
    "no leaf with elements": lambda: Of(lambda m, x: x.sum(-1) + no_units(x).sum(-1)),
    "no parameters": lambda: NO_PARAMETERS,
    "complex": lambda: Of(of_complex),
    "tied embedding": lambda: Of(tied_embedding),
    "tied in NNX": lambda: TiedNnx(nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", swept([*MODELS], every=3))
def test_n_devices_equal_one_device(name):
    beside_one_device(MODELS[name]())


@pytest.mark.parametrize("accumulate_steps, place", [(1, "leaf-end"), (2, "flat-ready")])
def test_dtypes_may_be_mixed_and_stay_as_they_are(accumulate_steps, place):
    options = {"accumulate_steps": accumulate_steps, "places": [place]}
    # A replica rounds its share's gradient to eight bits, one device that of the whole batch: 2^-6.
    ddp, state = beside_one_device(Of(mixed_dtypes), rtol=2**-6, **options)
    for name, layer in state.params.items():
        assert {x.dtype.name for x in jax.tree.leaves(layer)} == {name}
    assert {bucket.dtype.name for bucket in ddp.plan.buckets} == set(state.params)


@in_both_places
def test_the_imaginary_part_of_a_complex_gradient_arrives(place):
    """NUM-6, in closed form: |w x|^2 has the gradient 2 conj(w) x^2, conjugate as JAX has it."""
    square = Of(lambda m, x: jnp.abs(m.param("w", lambda _: jnp.complex64(1 + 2j)) * x) ** 2)
    batch = {"x": np.arange(1, 9, dtype=np.float32)}
    ddp = wrapped(square, lambda m, b: m(b["x"]), optimizer=optax.trace(0.0), **place)
    state, _ = ddp.step(ddp.init(0, batch), batch)
    gradient = 2 * (1 - 2j) * np.mean(batch["x"] ** 2)
    np.testing.assert_allclose(state.opt_state.trace["w"], gradient, rtol=1e-6)


def test_complex_and_real_parameters_travel_in_buckets_of_their_own():
    """NUM-6: one cap that would hold all."""
    ddp = wrapped(Of(of_complex), reduction=jddp.Reduction(bucket_mb=25))
    ddp.init(0, make_rows())
    assert {b.dtype.name: b.bytes for b in ddp.plan.buckets} == {"complex64": 96, "float32": 16}


@in_both_places
def test_a_model_without_parameters_sends_the_loss_and_nothing_else(place):
    ddp = wrapped(NO_PARAMETERS, max_grad_norm=1.0, ema_decay=0.9, **place)
    state, metrics = ddp.step(start(ddp, make_rows()), make_rows())
    assert (len(ddp.plan), float(metrics["grad_norm"]), int(state.step)) == (0, 0.0, 1)
    assert [x.num_elements for x in judge.sent(ddp)] == [2]


def test_parameters_that_are_no_floats_are_refused_by_name():
    """BKT-5: JAX gives them gradients of float0, which nobody can average."""
    for dtype in ("int32", "uint8", "bool"):

        def body(m, x, dtype=dtype):
            return Net()(x) + m.param("layer", lambda _: {"n": jnp.ones(3, dtype)})["n"].sum()

        with pytest.raises(ConfigError, match=f"'layer/n' is an array of {dtype}.*out of the par"):
            wrapped(Of(body)).init(0, make_rows())
    with pytest.raises(ConfigError, match="'n' is an array of int32"):  # before a batch is seen
        wrapped(nnx.Dict(n=nnx.Param(jnp.arange(3)))).init(0)


@pytest.mark.parametrize("model", [Net(), Of(of_complex)], ids=["real", "complex"])
def test_the_norm_is_that_of_the_whole_mean_gradient(model):
    """Not a replica's, a bucket's or a part's, before the mean or after it."""
    ddp, state = beside_one_device(model, max_grad_norm=0.1, accumulate_steps=2)
    assert ddp.step(state, make_rows())[1]["grad_norm"] > 0.1


def test_frozen_parameters_are_neither_sent_nor_in_the_optimizer_state():
    ddp, full = (wrapped(Net(), frozen=patterns) for patterns in (["first/.*"], []))
    shapes, whole = (x.steps.abstract_state(make_rows()) for x in (ddp, full))
    num_frozen = sum(x.size for x in jax.tree.leaves(whole.params["first"]))
    plans = [x.steps.planned(make_rows()).plan for x in (full, ddp)]
    assert plans[0].wire_bytes - plans[1].wire_bytes == 4 * num_frozen
    momentum = [sum(x.size for x in jax.tree.leaves(s.opt_state)) for s in (whole, shapes)]
    assert momentum[0] - momentum[1] == num_frozen
    assert "2 frozen leaves, 7.63e-05 MiB: neither trained nor sent" in str(plans[1])


@pytest.mark.parametrize(
    "model", swept([ConvNet(), NnxConvNet(nnx.Rngs(0))], every=2), ids=["linen", "nnx"]
)
@pytest.mark.parametrize("batch_norm", swept(["sync", "local"], every=2))
def test_a_run_with_frozen_parameters_is_read_as_that_of_a_whole_model(tmp_path, model, batch_norm):
    """Kept, opened, evaluated by its moving average, and continued with all parameters."""
    batch, frozen = make_batch(), {"frozen": lambda path: "kernel" in path, "ema_decay": 0.5}
    ddp = tiny.wrapped(model, optax.adam(0.1), batch_norm=batch_norm, **frozen)
    options = {"evaluate": jddp.Evaluation([batch], "ema"), "run_dir": tmp_path}
    run = jddp.fit(ddp, [batch] * 2, num_steps=2, **options)
    opened = jddp.open_run(tmp_path, model=model, loss_fn=loss_fn, mesh=2)
    assert opened.evaluate([batch]) == run.evaluate([batch])
    saved = read_newest(tmp_path / "checkpoints", ["params", "model_state"])
    assert "params" not in saved["model_state"]
    released = tiny.wrapped(model, batch_norm=batch_norm)
    state = released.init(0, batch, params=tmp_path)
    assert released.evaluate(state, [batch]) == ddp.evaluate(run.state, [batch])
    before = flatten_dict(jax.device_get(state.params))  # the step takes the state
    after = flatten_dict(take_steps(released, [batch], state)[0].params)
    assert not any(np.array_equal(x, after[path]) for path, x in before.items() if x.ndim > 1)


BAD = {
    "misspelt": (["frist/.*"], r"'frist/\.\*' matches no .*nearest are 'first/bias', 'first/k"),
    "a part of a path": (["first"], "'first' matches no whole path"),
    "no expression": (["(first"], "no regular expression: missing"),
    "all": (".*", "it matches all parameters"),
    "none": (lambda path: False, "it matches none"),
}


@pytest.mark.parametrize("frozen, message", BAD.values(), ids=BAD)
def test_patterns_that_match_nothing_or_everything_are_refused(frozen, message):
    with pytest.raises(jddp.ConfigError, match=message):
        wrapped(Net(), frozen=frozen).init(0, make_rows())


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_norm_whose_square_float16_cannot_hold_is_clipped_all_the_same(shard_optimizer):
    def steep(m, x):
        w = m.param("w", nn.initializers.zeros, (4,), jnp.float16)
        return w.astype(jnp.float32).sum() * x[:, 0]

    batch, options = {"x": np.full((judge.ROWS, 1), 300, np.float32)}, {"max_grad_norm": 1.0}
    options |= {"optimizer": optax.sgd(1.0), "strategy": "zero1" if shard_optimizer else "ddp"}
    ddp = wrapped(Of(steep), lambda m, b: m(b["x"]), **options)
    state, metrics = ddp.step(ddp.init(0, batch), batch)
    assert (metrics["grad_norm"], metrics["grad_norm"].dtype) == (600, jnp.float32)
    np.testing.assert_array_equal(state.params["w"], np.full(4, -0.5, np.float16))


BATCHES = [make_batch(seed=seed) for seed in range(4)]
DECAY = 0.75
HALVES = slice(0, 8), slice(8, 16)
PLACES = {
    "sync": {},
    "broadcast": {"batch_norm": "broadcast"},
    "local": {"batch_norm": "local"},
    "logical replicas": {"strategy": jddp.LogicalReplicas(2), "batch_norm": "local"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp", "skip_nonfinite": True},
    "local steps": {"strategy": jddp.LocalSteps(2), "batch_norm": "local"},
}
averaging = functools.partial(tiny.wrapped, ConvNet(), ema_decay=DECAY)


@pytest.mark.parametrize("place", swept([*PLACES], every=2))
def test_batch_statistics_are_averaged_with_the_parameters(place):
    """The judge averages by hand what the state holds after each step."""
    ddp = averaging(**PLACES[place])
    state = ddp.init(0, BATCHES[0])
    want = host((state.params, state.model_state))
    for batch in BATCHES:
        state, _ = ddp.step(state, batch)
        now = host((state.params, state.model_state))
        want = jax.tree.map(lambda a, x: DECAY * a + (1 - DECAY) * x, want, now)
    got = host(ddp.model(state, "ema"))
    want = {"params": want[0], **want[1]}
    close(got, jax.tree.map(lambda x, one: x.mean(0) if x.ndim > one.ndim else x, want, got))
    plain = tiny.wrapped(ConvNet(), batch_norm="broadcast")
    alone = plain.init(0, BATCHES[0], params=got)
    assert ddp.evaluate(state, BATCHES, "ema") == pytest.approx(plain.evaluate(alone, BATCHES))
    equal(ddp.model(state)["params"], ddp.model(state, "params")["params"])


def test_a_checkpoint_without_averaged_statistics_resumes_from_the_raw_ones(tmp_path):
    """As versions have written it that averaged parameters alone."""
    ddp = averaging(batch_norm="local")
    state, _ = ddp.step(ddp.init(0, BATCHES[0]), BATCHES[0])
    older = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    layouts = ddp.steps.layouts(state).replace(ema_state=None)
    older.save(1, state.replace(ema_state=None), {}, layouts)
    older.close()
    restored, _ = jddp.Checkpoints(tmp_path / "checkpoints").restore(ddp)
    equal(restored.ema_state, state.model_state)
    statistics = host(state.model_state)  # the step takes both
    restored, _ = ddp.step(restored, BATCHES[1])
    want = jax.tree.map(
        lambda a, x: DECAY * a + (1 - DECAY) * x, statistics, host(restored.model_state)
    )
    close(restored.ema_state, want)
    opened = jddp.open_run(tmp_path, model=ConvNet(), loss_fn=loss_fn, params="ema")
    means = jax.tree.map(lambda x: x.mean(0), statistics)
    close(opened._ddp.model(opened.state, "ema")["batch_stats"], means["batch_stats"])


FREE = optax.contrib.schedule_free_sgd(0.5, warmup_steps=2)
OPTIMIZERS = {
    "ddp": (FREE, {}),
    "zero1": (optax.contrib.schedule_free_adamw(0.1), {"strategy": "zero1"}),
    "fsdp": (optax.contrib.schedule_free_adamw(0.1), {"strategy": "fsdp"}),
    "in a chain": (optax.chain(optax.clip(0.1), FREE), {"max_grad_norm": 0.5}),
    "every second step": (optax.MultiSteps(FREE, 2), {}),
    "hyperparameters": (
        optax.inject_hyperparams(optax.contrib.schedule_free_sgd)(learning_rate=0.5),
        {"skip_nonfinite": True},
    ),
}


def net(m, x):
    """With a bias of three numbers, which two replicas do not divide, and a parameter of one."""
    return nn.Dense(3)(x) * m.param("scale", nn.initializers.ones, ())


def squares(model, batch):
    return ((model(batch["x"]) - batch["y"][:, None]) ** 2).mean(-1)


def by_optax(tx, params, batches):
    """Plain steps on one device; the parameters, and those that optax evaluates."""
    opt_state = tx.init(params)
    model = Of(net)

    def loss(params, batch):
        return squares(lambda x: model.apply({"params": params}, x), batch).mean()

    for batch in batches:
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        params = optax.apply_updates(params, updates)
    is_free = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)  # noqa: E731
    (free_state,) = filter(is_free, jax.tree.leaves(opt_state, is_leaf=is_free))

    def evaluated(y, z):
        masked = isinstance(z, optax.MaskedNode)
        return y if masked else optax.contrib.schedule_free_eval_params(free_state._replace(z=z), y)

    return params, jax.tree.map(evaluated, params, free_state.z)


@pytest.mark.parametrize("name", swept([*OPTIMIZERS], every=2))
def test_schedule_free_optimizers_are_evaluated_at_their_average(name):
    tx, options = OPTIMIZERS[name]
    ddp = tiny.wrapped(Of(net), tx, squares, **options)
    state = ddp.init(0, BATCHES[0])
    clipped = optax.chain(optax.clip_by_global_norm(0.5), tx) if "max_grad_norm" in options else tx
    stepped, want = by_optax(clipped, host(state.params), BATCHES)
    state, _ = take_steps(ddp, BATCHES, state)
    close(state.params, stepped)
    close(ddp.model(state)["params"], want, rtol=1e-4)  # differences, times nine
    assert np.abs(want["Dense_0"]["kernel"] - stepped["Dense_0"]["kernel"]).max() > 0.001
    # With parameters that somebody has put into the state, nothing is converted again.
    given = state.replace(params=jax.tree.map(jnp.asarray, want), opt_state=())
    rows = [make_batch(5, seed=9)]
    assert ddp.evaluate(state, rows) == pytest.approx(ddp.evaluate(given, rows), rel=1e-4)
    outputs = Of(net).apply({"params": want}, rows[0]["x"])
    np.testing.assert_allclose(ddp.predict(state, rows), outputs, rtol=1e-3, atol=1e-5)


def test_replicas_of_local_steps_are_evaluated_at_the_mean_of_their_averages():
    ddp = tiny.wrapped(Of(net), FREE, squares, strategy=jddp.LocalSteps(8))
    state = ddp.init(0, BATCHES[0])
    first = host(jax.tree.map(lambda x: x[0], state.params))
    state, _ = take_steps(ddp, BATCHES, state)
    halves = [[{k: x[rows] for k, x in b.items()} for b in BATCHES] for rows in HALVES]
    each = [by_optax(FREE, first, batches)[1] for batches in halves]
    close(ddp.model(state)["params"], jax.tree.map(lambda a, b: (a + b) / 2, *each), rtol=1e-4)


def test_a_run_of_a_schedule_free_optimizer_is_the_same_when_it_is_opened_and_exported(tmp_path):
    tx, rows = optax.contrib.schedule_free_adamw(0.1), [make_batch(6, seed=9)]
    ddp = tiny.wrapped(Of(net), tx, squares, strategy="zero1")
    options = {"run_dir": tmp_path / "run", "callbacks": [KeepBest("loss", mode="min")]}
    run = jddp.fit(ddp, BATCHES, num_steps=4, evaluate=rows, **options)
    _, want = by_optax(tx, host(ddp.init(0, BATCHES[0]).params), BATCHES)
    outputs = Of(net).apply({"params": want}, rows[0]["x"])
    loss = ((outputs - rows[0]["y"][:, None]) ** 2).mean()
    assert run.eval_metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
    for checkpoint in (None, "best"):
        given = {"model": Of(net), "loss_fn": squares}
        opened = jddp.open_run(tmp_path / "run", **given, checkpoint=checkpoint)
        assert opened.evaluate(rows)["loss"] == pytest.approx(float(loss), rel=1e-4)
        np.testing.assert_allclose(opened.predict(rows), outputs, rtol=1e-3, atol=1e-5)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "w.safetensors")]) == 0
    close(read_weights(tmp_path / "w.safetensors")["params"], want, rtol=1e-4)
    close(read_weights(tmp_path / "run")["params"], want, rtol=1e-4)
    raw = read_arrays(tmp_path / "run" / "checkpoints" / "4", ["params"])
    equal(raw["params/Dense_0/kernel"], run.state.params["Dense_0"]["kernel"])


def test_sam_is_evaluated_with_the_parameters_before_its_adversarial_step():
    uphill = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
    tx = optax.chain(optax.contrib.sam(optax.sgd(0.25), uphill))
    params = {"w": jnp.float32([3, 4])}
    opt_state = tx.init(params)
    for stepped, evaluated in (([3.3, 4.4], [3, 4]), ([2.175, 2.9], [2.175, 2.9])):
        grads = params  # of half the squares; the second from the adversarial parameters
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], stepped, rtol=1e-6)
        found = optimizer_params(params, by_path(opt_state))["w"]
        np.testing.assert_allclose(found, evaluated, rtol=1e-6)


def test_parameters_that_have_the_names_of_such_a_state_are_evaluated_as_they_are():
    params = {name: jnp.ones(2) for name in ("z", "b1", "weight_sum", "cache", "steps_since_sync")}
    equal(optimizer_params(params, by_path(optax.adam(0.1).init(params))), params)
