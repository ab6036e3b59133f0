"""The wrapper: what it promises, keeps and refuses, with the way out."""

import functools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn
from flax import nnx
from judge import host
from runs import at
from states import close, equal
from sweeps import swept
from tiny import MLP, MODELS, NUM_CLASSES, ConvNet, NnxConvNet, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.data import TrainBatches, eval_batches
from jddp.engine.compiled import Call
from jddp.engine.data_parallel import Executor
from jddp.ground.errors import ConfigError, DataError, UsageError

wrapped = functools.partial(tiny.wrapped, mesh=None)


def test_a_scalar_loss_is_a_mean_and_replicas_weigh_alike(mesh):
    def scalar(model, batch, train):
        losses, metrics = loss_fn(model, batch, train)
        return losses.mean(), {"accuracy": metrics["accuracy"].mean()}

    batch, ends = make_batch(), []
    for loss in (loss_fn, scalar):
        state, metrics = take_steps(wrapped(loss=loss, mesh=mesh), [batch])
        ends.append((state.params, metrics["loss"], metrics["accuracy"]))
    # The same mean, divided before or after the sum.
    close(*ends)
    assert metrics["count"] == mesh.size


def test_a_step_traces_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        ddp = wrapped(ConvNet(), max_grad_norm=1.0, ema_decay=0.9, accumulate_steps=2)
        batch = make_batch(masked=True)
        state, _ = ddp.step(ddp.init(0, batch), batch)
        ddp.evaluate(state, [batch])


def noise(m, x):
    return m.param("w", nn.initializers.ones, ()) * jax.random.uniform(m.make_rng("noise"), x.shape)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("parts", [[()], [(0,), (1,)]], ids=len)
def test_keys_are_those_of_a_step_a_replica_a_micro_batch_and_a_stream(parts, overlap):
    """A checkpoint resumes with it: the same step uses the same random numbers in any version."""
    options = {"accumulate_steps": len(parts), "reduction": jddp.Reduction(overlap=overlap)}
    ddp = wrapped(Of(noise), loss=lambda model, batch: model(batch["x"]), mesh=1, **options)
    # Rows without elements are cut as others are.
    batch, drawn = make_batch(2) | {"none": np.zeros((2, 0), np.float32)}, []
    state = ddp.init(0, batch)
    for part, rows in zip(parts, np.split(batch["x"], len(parts)), strict=True):
        words = (0, 0, *part, zlib.crc32(b"params"))
        key = functools.reduce(jax.random.fold_in, words, jax.random.key(0))
        drawn.append(Of(noise).apply(ddp.model(state), rows, rngs={"params": key}))
    _, metrics = ddp.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], np.mean(drawn), rtol=1e-6)


def test_a_user_s_values_outlive_a_donated_step_and_a_donated_state_is_refused():
    module, batch = NnxConvNet(nnx.Rngs(0), dropout_rate=0.5), make_batch()
    module.eval()
    ddp = wrapped(module)
    state, _ = ddp.step(ddp.init(0), batch)
    ddp.evaluate(state, [batch])
    assert module.dropout.deterministic  # Modules are switched on a copy.
    assert module(batch["x"]).shape == (16, NUM_CLASSES)
    model = ddp.model(state)
    assert model.norm.use_running_average
    ddp.step(state, batch)
    assert model(batch["x"]).shape == (16, NUM_CLASSES)
    for use in (lambda: ddp.step(state, batch), lambda: ddp.evaluate(state, [batch])):
        with pytest.raises(UsageError, match="step call 2 "):
            use()
    linen, mine = wrapped(), jnp.ones((16, 16))
    params = host(linen.init(0, batch).params)
    params["Dense_0"]["kernel"] = mine
    linen.step(linen.init(0, params={"params": params}), batch)
    assert float(mine.sum()) == 256


def test_an_average_of_bfloat16_parameters_moves_like_one_in_float32():
    exact = {"kernel_init": nn.initializers.ones, "dtype": jnp.float32}
    half = Of(lambda m, x: nn.Dense(3, param_dtype=jnp.bfloat16, **exact)(x))
    batch = {"x": np.ones((16, 5), np.float32), "y": np.ones((16, 3), np.float32)}
    ddp = wrapped(
        half, optax.sgd(0.5), lambda m, b: 0.5 * (m(b["x"]) - b["y"]) ** 2, ema_decay=0.999
    )
    state = ddp.init(0, batch)
    first = want = jax.tree.map(lambda x: x.astype(np.float64), host(state.params))
    for _ in range(5):
        state, _ = ddp.step(state, batch)
        want = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, want, host(state.params))
    moved, wanted = (jax.tree.map(np.subtract, host(x), first) for x in (state.ema_params, want))
    # Two roundings of bfloat16: XLA may average parameters before they are rounded.
    close(moved, wanted, rtol=2**-7)
    assert jax.tree.leaves(ddp.model(state, params="ema"))[0].dtype == jnp.bfloat16


def cut(rows, sizes):
    """Batches of some sizes."""
    parts = np.split(np.arange(len(rows["x"])), np.cumsum(sizes[:-1]))
    return [jax.tree.map(lambda x, part=part: x[part], rows) for part in parts]


def loss_with_tables(model, batch, train):
    logits, labels = model(batch["x"], train=train), batch["y"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    truth, guess = (jax.nn.one_hot(x, NUM_CLASSES, dtype=int) for x in (labels, logits.argmax(-1)))
    table = truth[:, :, None] * guess[:, None, :]
    return losses, {
        "perplexity": jddp.Metric(losses, lambda total, count: np.exp(total / count)),
        "confusion": jddp.Metric(table, lambda total, count: total),
        "top_2": (logits > jnp.take_along_axis(logits, labels[:, None], 1)).sum(1) < 2,
    }


def test_evaluation_counts_every_example_once_however_it_is_cut(mesh):
    """In means, and in metrics that are none, of which a step has none."""
    rows, ddp = make_batch(37), wrapped(ConvNet(), loss=loss_with_tables, mesh=mesh)
    state = ddp.init(0, make_batch())
    model, want = ConvNet().bind(ddp.model(state)), np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    losses, metrics = loss_with_tables(model, rows, False)
    np.add.at(want, (rows["y"], model(rows["x"], False).argmax(-1)), 1)
    for sizes in ([37], [16, 16, 5], [0, 37], [1] * 37):
        got = ddp.evaluate(state, cut(rows, sizes))
        assert (got["examples"], got["confusion"]) == (37, want.tolist())
        assert got["top_2"] == np.mean(metrics["top_2"])
        assert got["perplexity"] == pytest.approx(np.exp(got["loss"]), rel=1e-9)
        np.testing.assert_allclose(got["loss"], losses.mean(), rtol=1e-6)
    assert ddp.step(state, make_batch())[1].keys() == {"loss", "count", "top_2"}


def test_a_scalar_loss_is_evaluated_where_batches_divide_and_refused_where_not():
    scalar = wrapped(loss=lambda *args: loss_fn(*args)[0].mean())
    batches, state = [make_batch(32), make_batch(16, seed=1)], scalar.init(0, make_batch())
    got, want = (ddp.evaluate(state, batches)["loss"] for ddp in (scalar, wrapped()))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(UsageError, match="'loss' is a scalar"):
        scalar.evaluate(state, [make_batch(13)])
    for call in (scalar.evaluate, scalar.predict):
        with pytest.raises(UsageError, match="no batches"):
            call(state, iter([]))


@pytest.mark.parametrize("model", [ConvNet(), MLP(dropout_rate=0.5)], ids=["norm", "dropout"])
def test_a_loss_that_cannot_be_told_to_evaluate_is_refused_without_eval_fn(model):
    def untold(model, batch):
        return loss_fn(model, batch, train=True)

    told = {"loss": untold, "eval_fn": lambda m, b: loss_fn(m, b, False)}
    ddp, batch = wrapped(model, loss=untold), make_batch()
    with pytest.raises(UsageError, match="eval_fn="):
        ddp.evaluate(ddp.init(0, batch), [batch])
    for ddp in (wrapped(model, **told), wrapped(loss=untold)):  # A plain model is as it is.
        assert ddp.evaluate(ddp.init(0, batch), [batch])["examples"] == 16


def test_batches_may_be_on_the_host_on_one_device_or_spread():
    ddp, batch = wrapped(donate=False), make_batch()
    state = ddp.init(0, batch)
    forms = (batch, jax.tree.map(jnp.asarray, batch), ddp.shard_batch(batch))
    first, *others = (ddp.step(state, form)[0].params for form in forms)
    for other in others:
        equal(other, first)


def test_mistakes_are_refused_with_the_way_out():
    two_axes = jax.sharding.Mesh(np.array([jax.devices()]), ("a", "b"))
    multi = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    params = {"Dense_0": {"kernel": np.ones((16, 16), np.float32), "bias": np.ones(16, np.float32)}}
    params["Dense_1"] = {"kernel": np.ones((3, 3), np.float32), "bias": np.ones(4, np.float32)}
    wrapped(optimizer=multi).init(0, make_batch())

    def on_batch(model, batch, train):
        return jax.lax.pmean(loss_fn(model, batch, train)[0], "batch")

    def init(batch=None, params=None, **options):
        wrapped(**options).init(0, make_batch() if batch is None else batch, params=params)

    def step(rows, **options):
        ddp = wrapped(**options)
        ddp.step(ddp.init(0, make_batch()), make_batch(rows))

    def step_placed(rows, **options):
        ddp = wrapped(**options)
        there = jax.NamedSharding(ddp.mesh, jax.P("data"))
        ddp.step(ddp.init(0, make_batch()), jax.device_put(make_batch(rows), there))

    for error, make, message in (
        (ConfigError, lambda: init(batch_norm="none"), "batch_norm='none': name must be 'sync'"),
        (ConfigError, lambda: init(accumulate_steps=0), "accumulate_steps"),
        (ConfigError, lambda: init(max_grad_norm=0), "max_grad_norm"),
        (ConfigError, lambda: init(ema_decay=1), "ema_decay"),
        (ConfigError, lambda: init(mesh=3000), "can give a multiple of 1 up to 8"),
        (ConfigError, lambda: init(mesh=two_axes), "'a', 'b'.*needs one"),
        (ConfigError, lambda: init(params=params), r"'Dense_1/kernel': got \(3, 3\).*\(16, 4\)"),
        (UsageError, lambda: wrapped().init(0), "batch="),
        (DataError, lambda: init({**make_batch(), "y": np.zeros(8, int)}), "same number of rows"),
        (ConfigError, lambda: step(16, loss=on_batch), "axis 'batch'.*'batch',.*mesh.axis_name"),
        (ConfigError, lambda: step(12), "12 rows .* 8 devices.*: 8 and 16"),
        (ConfigError, lambda: step(3), "3 rows .* 8 devices.*: 8"),
        (ConfigError, lambda: step(0), "0 rows .* 8 devices.*: 8"),
        (
            ConfigError,
            lambda: step(12, mesh=2, accumulate_steps=4),
            "2 devices times accumulate_steps=4.*: 8 and 16",
        ),
        (ConfigError, lambda: step_placed(12, mesh=2, accumulate_steps=4), "12 rows .*: 8 and 16"),
    ):
        with pytest.raises(error, match=message):
            make()


class Computed:
    """A value on devices, which notes that it was waited for."""

    def __init__(self, number, waited):
        self.number, self.waited = number, waited

    def block_until_ready(self):
        self.waited.append(self.number)


@pytest.mark.parametrize("platform, waited_for", [("cpu", [0, 1, 2]), ("gpu", [])])
def test_at_most_four_steps_are_in_flight_on_cpus(platform, waited_for):
    executor, waited = Executor(donate=False, platform=platform), []
    for i in range(7):

        def run(state, inputs, i=i):
            return state, Computed(i, waited)

        executor.send(Call(None, run, f"state {i}", None))
    assert waited == waited_for
    assert executor.latest == "state 6"


def test_an_optimizer_or_a_strategy_that_is_none_is_refused_with_what_to_give():
    of_nnx = nnx.Optimizer(MODELS["nnx"](), optax.adam(0.1), wrt=nnx.Param)
    for optimizer, kind in ((optax.adam, "function"), (of_nnx, "Optimizer"), ("adam", "str")):
        with pytest.raises(ConfigError, match=rf"optimizer is of type {kind}.*optax.adam\(1e-3\)"):
            tiny.wrapped(optimizer=optimizer)
    with pytest.raises(ConfigError, match="strategy=16 is none. Choose 'ddp'"):
        tiny.wrapped(strategy=16)


MEANT = {"bucket_cap_mb": "reduction", "find_unused_parameters": "unused_parameters"}
MEANT |= {"broadcast_buffers": "batch_norm", "process_group": "mesh", "device_ids": "mesh"}
MEANT |= {"gradient_accumulation_steps": "accumulate_steps", "max_norm": "max_grad_norm"}
MEANT |= {"wire_dtype": "reduction", "mixed_precision": "precision", "zero_stage": "strategy"}
MEANT |= {"gradient_clip_val": "max_grad_norm", "gradient_clip": "max_grad_norm"}
MEANT |= {"run_dir": "fit(run_dir=)", "logger": "fit(sinks=)", "max_steps": "fit(num_steps=)"}


def test_an_unknown_option_is_given_the_name_that_is_meant():
    for foreign, meant in MEANT.items():
        with pytest.raises(ConfigError, match=re.escape(f"'{foreign}'. Did you mean '{meant}'")):
            tiny.wrapped(**{foreign: 25})
    with pytest.raises(ConfigError, match="l.zzz: DataParallel takes no argument 'zzz'.$"):
        tiny.wrapped(zzz=1)


def test_fit_knows_the_names_of_its_options_before_it_reads_a_batch():
    def never():
        raise AssertionError("read")
        yield

    meant = {"eval_every": "eval_every_steps", "log_every_n_steps": "log_every_steps"}
    meant |= {"output_dir": "run_dir", "accumulate_steps": "DataParallel(accumulate_steps=)"}
    meant |= {"shuffle": "TrainBatches(order=jddp.data.Order(num_examples, seed, shuffle=False))"}
    for foreign in ("num_workers", "eval_batches", *meant):
        said = f"Did you mean '{meant[foreign]}'" if foreign in meant else ""
        with pytest.raises(ConfigError, match=f"fit.{foreign}: .*{re.escape(said)}"):
            jddp.fit(tiny.wrapped(), never(), num_steps=2, **{foreign: 3})


@pytest.mark.parametrize("model", swept(["mlp", "nnx"], every=2))
def test_a_state_of_another_model_is_refused_by_name_and_one_of_another_object_taken(model):
    batch = make_batch()
    other = tiny.wrapped(model=Of(lambda m, x, train: nn.Dense(4)(nn.Dense(17)(x)))).init(0, batch)
    ddp, elsewhere = (tiny.wrapped(model=MODELS[model]()) for _ in range(2))
    same = elsewhere.init(1, batch)
    reported = "parameters of another model"
    with pytest.raises(UsageError, match=reported):  # also before this one has a state of its own
        ddp.step(other, batch)
    assert ddp.evaluate(same, [batch]) == elsewhere.evaluate(same, [batch])
    state = ddp.init(0, batch)
    for call in (*calls_of(ddp, batch), ddp.model):
        with pytest.raises(UsageError, match=reported):
            call(other)
    ddp.step(state, batch)
    ddp.step(same, batch)


def calls_of(ddp, batch):
    """Every call that takes a state, with rows."""
    yield from (lambda state, call=x: call(state, batch) for x in (ddp.step, ddp.gradients))
    yield from (lambda state, call=x: call(state, [batch]) for x in (ddp.evaluate, ddp.predict))


def test_what_is_no_state_of_a_device_or_of_others_is_refused_by_name():
    ddp, batch = tiny.wrapped(), make_batch()
    state = ddp.init(0, batch)
    run = jddp.fit(ddp, [batch], num_steps=1, state=state)
    for given, message in (
        (None, "NoneType is none"),
        (state.params, "dict is none"),
        (run, "Run is none"),
        (jax.device_get(state), r"on the devices.*init\(params=state.params\)"),
        (tiny.wrapped(mesh=4).init(0, batch), "^This state lies on other devices"),
    ):
        for call in calls_of(ddp, batch):
            with pytest.raises(UsageError, match=message):
                call(given)
        if given is not None:
            with pytest.raises(UsageError, match=message):
                jddp.fit(ddp, [batch], num_steps=1, state=given)


def test_a_state_of_another_optimizer_is_refused_where_the_optimizer_is_used():
    ddp, had_a_state, batch = tiny.wrapped(), tiny.wrapped(), make_batch()
    other = tiny.wrapped(optimizer=optax.sgd(0.1, momentum=0.9))
    state = other.init(0, batch)
    had_a_state.init(0, batch)
    for call in (x for each in (ddp, had_a_state) for x in (each.step, each.gradients)):
        with pytest.raises(UsageError, match="from another optimizer"):
            call(state, batch)
    assert ddp.evaluate(state, [batch]) == other.evaluate(state, [batch])


def test_a_seed_or_a_mesh_that_is_none_is_refused_in_one_line():
    for seed in (-1, 2**32, 0.5, "1", True):
        with pytest.raises(ConfigError, match=f"^seed {seed!r} is no whole number from 0 to"):
            tiny.wrapped().init(seed, make_batch())
    for mesh in ("4", True, [], ["cpu:0"], {"data": 4}, 2.0):
        with pytest.raises(ConfigError, match=re.escape(f"mesh={mesh!r} is none")):
            tiny.wrapped(mesh=mesh)


FP8 = Of(lambda m, x, train: nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_model_with_fp8_layers_is_refused(kind):
    model, batch = FP8, make_batch()
    if kind == "nnx":
        model = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(batch["x"], train=True)
    with pytest.raises(ConfigError, match="_overwrite_with_gradient': its fp8 layers expect that"):
        tiny.wrapped(model=model).init(0, batch)


@pytest.mark.parametrize("model", ["mlp", "nnx"])
def test_a_key_that_the_batch_lacks_is_named_beside_those_that_it_has(model):
    def loss(model, batch, train):
        return loss_fn(model, {**batch, "x": batch["image"]}, train)

    ddp, batch = tiny.wrapped(MODELS[model](), loss=loss), make_batch()
    state = ddp.init(0, {"image": batch["x"], "y": batch["y"]})
    reported = r"loss_fn reads batch\['image'\], and the batch holds x, y\."
    calls = [
        (ddp.steps.abstract_state, batch),
        (ddp.step, state, batch),
        (ddp.evaluate, state, [batch]),
    ]
    for call, *given in calls:
        with pytest.raises(ConfigError, match=reported):
            call(*given)
    with pytest.raises(ConfigError, match="as a dict, but it is a tuple. Yield dicts"):
        tiny.wrapped().init(0, tuple(batch.values()))


def test_another_key_error_of_the_users_code_stays_what_it_is():
    with pytest.raises(KeyError, match="b"):
        tiny.wrapped(loss=lambda *given: loss_fn(*given)[0] * MEANT["b"]).init(0, make_batch())


def test_batches_are_made_of_a_dict_of_arrays_and_not_of_arrays_without_names():
    batch = make_batch(20)
    assert len(eval_batches(batch, global_batch_size=8)) == 3
    batches = TrainBatches({"x": jnp.ones((4, 2))}, global_batch_size=2, seed=0)
    assert isinstance(next(batches)["x"], np.ndarray)
    for make, more in ((TrainBatches, {"seed": 0}), (eval_batches, {})):
        with pytest.raises(DataError, match="of type tuple cannot be read. Give a dict of arrays"):
            make(tuple(batch.values()), global_batch_size=1, **more)


def fractional():
    mask = np.ones(16, np.float32)
    mask[3:9] = 0.5
    mask[9:11] = 0
    return make_batch() | {"mask": mask}


def test_weights_in_the_place_of_a_mask_are_refused():
    ddp, batch = tiny.wrapped(), fractional()
    state, message = ddp.init(0, make_batch()), r"'mask'\] holds 0.5: a mask is 1 .* jddp.Mean"
    for call in (
        lambda: ddp.step(state, batch),
        lambda: ddp.evaluate(state, [batch]),
        lambda: jddp.fit(ddp, [batch], num_steps=1),
        lambda: ddp.pad(batch),
    ):
        with pytest.raises(jddp.Error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_on_a_device_every_number_above_zero_counts_once():
    ddp = tiny.wrapped()
    ends, mask = [], fractional()["mask"]
    for given in (mask, mask > 0, np.ceil(mask).astype(np.int32)):
        batch = fractional() | {"mask": given}
        placed = jax.device_put(batch, jax.NamedSharding(ddp.mesh, jax.P("data")))
        state, metrics = ddp.step(ddp.init(0, placed), placed)
        ends.append(host((state.params, metrics)))
    equal(ends[1:], ends[:1] * 2)
    assert ends[0][1]["count"] == 14


def aligned(array):
    """A copy that begins at a multiple of 64 bytes, where JAX takes memory as it is on a CPU."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    found = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[:] = array
    return found


EIGHT = tiny.make_batches(8, rows=16)


class Reused:
    """Batches in one buffer, which the next batch overwrites, and whose state is one dict."""

    def __init__(self):
        self._buffer = {name: aligned(x) for name, x in EIGHT[0].items()}
        self._state = {"position": {"next": 0}}

    def __iter__(self):
        return self

    def __next__(self):
        number = self._state["position"]["next"]
        if number == len(EIGHT):
            raise StopIteration
        for name, x in EIGHT[number].items():
            self._buffer[name][:] = x
        self._state["position"]["next"] = number + 1
        return self._buffer

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._state = state


def test_a_batch_may_be_overwritten_by_the_next_in_fit_a_step_and_an_evaluation():
    ddp = tiny.wrapped()
    want = jddp.fit(ddp, EIGHT, num_steps=8, evaluate=EIGHT)
    run = jddp.fit(ddp, Reused(), num_steps=8, evaluate=EIGHT)
    equal(run.state.params, want.state.params)
    assert ddp.evaluate(run.state, Reused()) == want.evaluate()
    state = ddp.init(0, make_batch())
    for batch in Reused():
        state, _ = ddp.step(state, batch)
        batch["x"][:] = np.nan
    equal(state.params, want.state.params)


def fail(run):
    raise ValueError("mine")


def test_a_saved_position_stays_where_it_was_though_the_iterator_moves_its_own(tmp_path):
    with pytest.raises(ValueError, match="mine"):
        jddp.fit(tiny.wrapped(), Reused(), num_steps=8, run_dir=tmp_path, callbacks=[at(4, fail)])
    run = jddp.fit(tiny.wrapped(), Reused(), num_steps=8, run_dir=tmp_path)
    equal(run.state.params, jddp.fit(tiny.wrapped(), EIGHT, num_steps=8).state.params)
