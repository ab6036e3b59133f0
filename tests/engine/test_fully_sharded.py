"""`strategy="fsdp"`: each replica keeps a part of parameters, their average and optimizer state."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import linen as nn
from jax.experimental import io_callback
from judge import Either, Net, assert_close, host, make_rows, sent, squares, start, wrapped
from models import GALLERY
from sweeps import swept
from tiny import MODELS, Of, loss_fn, make_batch, take_steps

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.config.schema import Config
from jddp.engine.digest import as_words, digests
from jddp.engine.initial_state import put_given
from jddp.engine.state import Divided, Inputs, Replicated, by_path
from jddp.ground.errors import ConfigError
from jddp.inspection.collectives import collectives
from jddp.inspection.hlo import read_program
from jddp.modules.base import thaw
from jddp.trainer.job.build import build
from jddp.zoo.optimizers import decay_mask

# Sums of the replicas in another order, five steps long, of the largest entry; a large epsilon
# keeps Adam from making whole updates of the rounding of a zero gradient.
ROUNDING = 2e-6
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=decay_mask),
    "sgd": optax.sgd(0.1, momentum=0.9),
}
# Scanned and unrolled layers, a loop that takes parameters whole, tied weights, batch norm.
QUICK = ["scanned_transformer"]
OTHERS = {
    "slow": ["tied_autoencoder", "lstm_tagger", "resnet_nnx", "moe"],
    "long": ["stacked_nnx", "seq2seq", "vae", "diffusion"],
}
MODELS_OF_OTHERS = [
    *QUICK,
    *(
        pytest.param(name, marks=getattr(pytest.mark, mark))
        for mark, names in OTHERS.items()
        for name in names
    ),
]


def values_of(ddp, state):
    """Parameters, their average and the optimizer's state, whole on the host."""
    return host((state.params, state.ema_params, state.opt_state, state.model_state))


def both(make, batches, *, rtol=ROUNDING, strategy="fsdp"):
    """Trains as ddp and as fsdp from the same values; compares, and returns the latter."""
    ends, first, variables = [], None, None
    for chosen in ("ddp", strategy):
        ddp = make(strategy=chosen)
        state = ddp.init(0, batches[0])
        if ends:
            jax.tree.map(np.testing.assert_array_equal, host(state.params), first)
        if ends and ddp.steps.spec.model.values is None:
            state = ddp.init(0, batches[0], params=variables)
        if not ends:
            first, variables = host(state.params), ddp.model(state)
        state, metrics = take_steps(ddp, batches, state)
        ends.append((values_of(ddp, state), host(metrics)))
    assert_close(ends[1][0], ends[0][0], rtol=rtol)
    assert_close(ends[1][1], ends[0][1], rtol=max(rtol, 1e-5))
    return ddp, state


@pytest.mark.parametrize("optimizer", swept([*OPTIMIZERS], every=2))
@pytest.mark.parametrize("name", MODELS_OF_OTHERS)
def test_five_steps_are_those_of_replicated_parameters(name, optimizer):
    example = GALLERY[name]
    batches = [example.make_batch(16, seed) for seed in range(5)]
    make = functools.partial(
        jddp.DataParallel, example.model(), OPTIMIZERS[optimizer], example.loss_fn, mesh=4
    )
    ddp, state = both(functools.partial(make, **example.options), batches, rtol=1e-5)
    assert any(isinstance(x, Divided) for x in jax.tree.leaves(ddp.steps.layouts(state).params))


def twice(model, batch):
    """Two forward passes through the same parameters."""
    return squares(model, batch) + squares(model, {**batch, "x": 2 * batch["x"]})


def of_one_branch(model, batch):
    if model.is_initializing():
        model.b(batch["x"])
    return (model.a(batch["x"]) - batch["y"]) ** 2


DYNAMIC = jddp.Precision(loss_scale="dynamic")
NARROW = jddp.Reduction(wire_dtype="bfloat16")
CASES = {
    "kept": {"strategy": jddp.FSDP(regather=False)},
    "accumulated": {"accumulate_steps": 2, "max_grad_norm": 0.1},
    "averaged": {"ema_decay": 0.9, "skip_nonfinite": True, "unused_parameters": "skip"},
    "scaled": {"precision": DYNAMIC, "frozen": ["first/kernel"]},
    "narrow": {"reduction": NARROW, "accumulate_steps": 2},
    "computed in bfloat16": {"precision": "bfloat16"},
}
MODELS_OF_CASES = {"averaged": (Either(), of_one_branch), "scaled": (Net(), twice)}
# Gradients are rounded to 8 bits in each micro-batch, not in their sum.
ROUNDED = {"narrow": 2**-7}


@pytest.mark.parametrize("case", swept([*CASES], every=2))
def test_other_options_are_those_of_replicated_parameters(case):
    options, (model, loss) = dict(CASES[case]), MODELS_OF_CASES.get(case, (Net(), squares))
    strategy = options.pop("strategy", "fsdp")
    batches = [make_rows(seed=i) for i in range(5)]
    skips = case in ("averaged", "scaled")
    if skips:
        batches[2]["x"][-1] = np.inf  # on one replica: no shard of any other moves either
    make = functools.partial(wrapped, model, loss, optimizer=OPTIMIZERS["adamw"], **options)
    ddp, state = both(make, batches, rtol=ROUNDED.get(case, 1e-5), strategy=strategy)
    assert int(state.skipped) == skips
    if case == "scaled":
        assert state.params["first"].keys() == {"bias"}
        assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * 3  # none of what is frozen
    if case == "averaged":  # weights of what no gradient reaches would decay
        first = ddp.init(0, batches[0]).params["b"]
        assert_close(host(state.params["b"]), host(first), rtol=1e-6)


@pytest.mark.slow
def test_gradients_are_whole_and_within_rounding():
    found = {}
    for strategy in ("ddp", "fsdp"):
        ddp = wrapped(MODELS["transformer"](), loss_fn, mesh=8, strategy=strategy)
        batch = make_batch(masked=True)
        found[strategy] = host(ddp.gradients(ddp.init(0, batch), batch))
    assert_close(found["fsdp"][0], found["ddp"][0], rtol=1e-6)
    assert_close(found["fsdp"][1], found["ddp"][1], rtol=1e-6)


def whole_numbers(m, x):
    w = m.param("w", lambda *_: jnp.arange(32.0).reshape(4, 8) % 3)
    return (x @ w) @ m.param("v", lambda *_: jnp.arange(8.0) % 2)


def test_whole_numbers_are_bitwise_those_of_one_device():
    x = (np.arange(64.0).reshape(16, 4) % 5).astype(np.float32)
    batch, ends = {"x": x, "y": x.sum(1)}, []
    for mesh, strategy in ((1, "ddp"), (8, "fsdp")):
        ddp = wrapped(
            Of(whole_numbers),
            lambda m, b: m(b["x"]) - b["y"],
            optimizer=optax.sgd(1.0),
            mesh=mesh,
            strategy=strategy,
        )
        state, metrics = take_steps(ddp, [batch])
        ends.append(host((state.params, metrics)))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def odd(m, x):
    x = x * m.param("scalar", nn.initializers.ones, ())
    m.param("empty", nn.initializers.ones, (0, 8))
    x = nn.Dense(8)(nn.tanh(nn.Dense(15, name="odd")(x)))
    return nn.Dense(1)(x)[:, 0]


DRAWN = {
    "lecun_normal": nn.initializers.lecun_normal(),
    "orthogonal": nn.initializers.orthogonal(),
    "normal": nn.initializers.normal(),
    "uniform": nn.initializers.uniform(),
    "xavier": nn.initializers.xavier_uniform(),
}


def drawn(m, x):
    """Parameters by many initializers, of shapes whose parts end in the middle of a vector."""
    for name, initializer in DRAWN.items():
        for rows, width in ((8, 5), (56, 3), (7, 8), (72, 33), (4, 4), (15, 8)):
            x = x + m.param(f"{name}_{rows}_{width}", initializer, (rows, width)).sum()
    return x.sum(-1)


def test_a_seed_gives_the_same_bits_with_any_strategy_on_any_number_of_devices():
    found = [
        host(start(wrapped(Of(drawn), squares, mesh=num, strategy=strategy), make_rows()).params)
        for strategy, num in (
            ("ddp", 1),
            ("ddp", 8),
            ("zero1", 8),
            ("fsdp", 8),
            ("fsdp", 4),
            ("fsdp", 3),
            (jddp.FSDP(group_size=4), 8),
            (jddp.LogicalReplicas(8), 4),
        )
    ]
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


def test_what_does_not_divide_stays_whole_and_the_plan_says_so():
    make = functools.partial(wrapped, Of(odd), mesh=4, max_grad_norm=0.1)
    ddp, state = both(make, [make_rows(seed=i) for i in range(3)], rtol=1e-5)
    layouts = ddp.steps.layouts(state).params
    assert layouts["scalar"] == layouts["empty"] == Replicated() == layouts["odd"]["bias"]
    assert layouts["odd"]["kernel"] == Divided(0, 4)
    assert "whole, as 4 divides none of their dims: " in str(ddp.plan)
    assert "divided over 4 replicas, in no bucket: " in str(ddp.plan)
    assert "all-gathered twice and reduce-scattered once" in str(ddp.plan)
    assert max(map(len, str(ddp.plan).splitlines())) <= 80


def test_a_job_has_the_shapes_of_whole_parameters():
    def shapes(strategy):
        config = Config(train={"num_steps": 1}, ddp={"strategy": strategy})
        return build(config, needs_data=False).parameter_shapes

    assert shapes("fsdp") == shapes("ddp") == shapes("zero1")


def test_a_replica_keeps_its_part_of_parameters_average_and_optimizer():
    def wide(m, x):
        return nn.Dense(8)(nn.relu(nn.Dense(1000)(x))).sum(1)

    kept = {}
    for strategy in ("ddp", "fsdp"):
        ddp = wrapped(
            Of(wide), optimizer=optax.adam(1e-3), mesh=8, ema_decay=0.9, strategy=strategy
        )
        state = start(ddp, make_rows())
        arrays = jax.tree.leaves((state.params, state.ema_params, state.opt_state))
        kept[strategy] = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        found = jddp.memory(ddp, make_rows())
        assert found.parameters + found.optimizer == kept[strategy]
        state, _ = ddp.step(state, make_rows())
        after = jax.tree.leaves((state.params, state.ema_params, state.opt_state))
        assert [x.sharding.spec for x in after] == [x.sharding.spec for x in arrays]
    assert kept["fsdp"] <= (1 / 8 + 0.02) * kept["ddp"]


def test_what_travels_is_each_parameter_twice_and_each_gradient_once():
    def layers(m, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(8)(x))
        return x[:, 0]

    found = {}
    for regather in (True, False):
        ddp = wrapped(Of(layers), strategy=jddp.FSDP(regather=regather))
        lowered = ddp.steps.lower(make_rows())
        found[regather] = [
            lowered.as_text().count(f"stablehlo.{op}") for op in ("all_gather", "all_to_all")
        ]
        read = sent(ddp)
        divided = sum(x.size for x in jax.tree.leaves(ddp.steps.abstract_state(make_rows()).params))
        # XLA:CPU drops the barrier that keeps the second gather apart from the first.
        assert sum(x.num_elements for x in read if x.op == "all-gather") == divided
        assert sum(x.num_elements for x in read if x.op == "all-to-all") == divided
    explained = str(jddp.explain(ddp, make_rows()))
    assert re.search(r"all-gather .* parameters, forward\n", explained)
    assert re.search(r"all-to-all .* gradients\n", explained)
    assert "Parameters and gradients of units are" in explained
    assert "Planned are 6 units, 0 of them in loops; the program gathers\n6 in" in explained
    assert "MiB, 2.0 times its part of the parameters." in " ".join(explained.split())
    kept = jddp.explain(ddp, make_rows()).as_json()["memory"]["parameters"]
    assert kept * ddp.mesh.size == 4 * divided
    # Buckets of 80 bytes: a unit is one kernel and no more, or a bias; no bias is gathered again,
    # nor the first kernel, which the backward pass does not need.
    gathers, means = found[False]
    assert (gathers, means) == (6, 6)
    assert found[True] == [gathers + 2, means]


def test_the_plan_lists_units_with_their_loops_and_passes():
    example = GALLERY["scanned_transformer"]
    options = {"mesh": 4, "reduction": jddp.Reduction(bucket_mb=2e-4), **example.options}
    for regather, num_passes in ((True, 2), (False, 1)):
        ddp = jddp.DataParallel(
            example.model(),
            optax.sgd(0.1),
            example.loss_fn,
            strategy=jddp.FSDP(regather=regather),
            **options,
        )
        batch = example.make_batch(16, 0)
        plan, params = ddp.steps.planned(batch).plan, ddp.steps.abstract_state(batch).params
        # What is recomputed is gathered again in any case.
        assert all(x.num_passes == (2 if x.num_slices == 3 else num_passes) for x in plan.units)
        assert sum(x.bytes for x in plan.units) == sum(4 * x.size for x in jax.tree.leaves(params))
        in_loops = [p for x in plan.units if x.num_slices == 3 for p in x.bucket.paths]
        assert sorted(in_loops) == [x for x in by_path(params) if "layers" in x]
        received = sum(x.bytes * x.num_passes for x in plan.units) * 3 / 4 / 2**20
        assert f"receives {received:.3g} MiB of parameters" in str(plan)
        assert re.search(rf"\n +0 .* float32   {num_passes} x 1 +\S*embedding", str(plan))
        assert max(map(len, str(plan).splitlines())) <= 80


def test_mixed_precision_gathers_half_the_bytes():
    def layers(m, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))[:, 0]

    for dtype, precision in (("f32", None), ("bf16", "bfloat16")):
        ddp = wrapped(Of(layers), precision=precision, strategy=jddp.FSDP(regather=False))
        text = ddp.steps.lower(make_rows()).as_text()
        found = re.findall(
            r"stablehlo\.(all_gather|all_to_all).*?-> tensor<[\dx]*x(\w+)>", text, re.S
        )
        assert {*found} == {("all_gather", dtype), ("all_to_all", "f32")}


def test_evaluation_prediction_and_the_model_are_those_of_whole_parameters():
    batch, found = make_batch(), {}
    for strategy in ("ddp", "fsdp"):
        ddp = wrapped(MODELS["mlp"](), loss_fn, mesh=8, ema_decay=0.9, strategy=strategy)
        state = start(ddp, batch)
        found[strategy] = host(
            (
                ddp.evaluate(state, [batch, make_batch(5, seed=1)]),
                ddp.evaluate(state, [batch], params="ema"),
                ddp.predict(state, [batch], lambda m, b: m(b["x"], train=False)),
                ddp.model(state),
                jddp.diagnose(ddp, state, batch),
            )
        )
        words = as_words(digests(state.params), state.params)
        assert words == found.setdefault("words", words)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), *map(found.get, ("ddp", "fsdp"))
    )


def test_given_parameters_are_whole_on_no_device(tmp_path, monkeypatch):
    device_put, parts = jax.device_put, []

    def recorded(x, sharding):
        parts.append((x.shape, sharding.shard_shape(x.shape)))
        return device_put(x, sharding)

    ddp = wrapped(Net(), strategy="fsdp", ema_decay=0.9, frozen=["first/bias"])
    values = Net().init(jax.random.key(0), make_rows()["x"])["params"]
    file = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file({n: np.asarray(x) for n, x in by_path(values).items()}, file)
    monkeypatch.setattr(jax, "device_put", recorded)
    for given in (values, file):
        parts.clear()
        state = ddp.init(0, make_rows(), params=given)
        assert ((4, 4), (1, 4)) in parts
        assert ((4, 1), (1, 1)) in parts
        assert ((4,), (4,)) in parts  # frozen
        for tree in (state.params, state.ema_params):
            whole, _ = thaw(tree, state.model_state)
            jax.tree.map(np.testing.assert_array_equal, host(whole), host(values))
    # The program that makes a state of them gathers nothing.
    given = put_given(ddp.steps.spec, ddp.mesh, (values, {}))
    compiled = ddp.steps.init.lower(np.uint32(0), Inputs(None), *given).compile()
    assert not collectives(read_program(compiled.as_text()))


@pytest.mark.parametrize("dropout_rate", swept([0.0, 0.2], every=2))
def test_verify_holds_it_against_one_device_or_its_shares_side_by_side(dropout_rate):
    model, batch = MODELS["mlp"](dropout_rate=dropout_rate), make_batch()
    report = jddp.verify(model, optax.adam(1e-3), loss_fn, batch, strategy="fsdp")
    assert report.passed, str(report)
    assert report.is_side_by_side == (dropout_rate > 0)


@pytest.mark.slow
def test_a_checkpoint_resumes_by_any_strategy_on_any_number_of_devices(tmp_path):
    batch, optimizer = make_rows(24), optax.adam(1e-2, eps=1e-3)

    def made(strategy, num):
        ddp = wrapped(Net(), optimizer=optimizer, mesh=num, strategy=strategy)
        return ddp, start(ddp, batch)

    alone, state = made("ddp", 1)
    ways = [("fsdp", 8), ("fsdp", 4), ("zero1", 2), ("fsdp", 3), ("ddp", 2), ("fsdp", 2)]
    for step, (strategy, num) in enumerate(ways):
        ddp, moving = made(strategy, num)
        checkpoints = CheckpointFolder(tmp_path, keep=2)
        if step:
            restored = checkpoints.restore(moving, ddp.steps.layouts(moving))
            assert restored.step == step
            specs = [x.sharding.spec for x in jax.tree.leaves(moving.params)]
            moving = restored.state
            assert [x.sharding.spec for x in jax.tree.leaves(moving.params)] == specs
        moving, _ = ddp.step(moving, batch)
        state, _ = alone.step(state, batch)
        checkpoints.save(step + 1, moving, {}, ddp.steps.layouts(moving))
        checkpoints.close()
        assert_close(host(moving.params), host(state.params), rtol=1e-5)


def test_a_resumed_run_is_bitwise_the_one_that_went_on(tmp_path):
    ddp = wrapped(Net(), optimizer=optax.adam(1e-2), strategy="fsdp")
    state, _ = take_steps(ddp, [make_rows()], start(ddp, make_rows()))
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    checkpoints.save(1, state, {}, ddp.steps.layouts(state))
    like = start(ddp, make_rows())
    restored = checkpoints.restore(like, ddp.steps.layouts(like)).state
    checkpoints.close()
    ends = [ddp.step(s, make_rows(seed=1))[0] for s in (state, restored)]
    jax.tree.map(np.testing.assert_array_equal, *(host(x.params) for x in ends))


REFUSED = {
    "reduction.hook": {"reduction": jddp.Reduction(hook=jddp.powersgd(rank=1))},
    "reduction.overlap=True": {"reduction": jddp.Reduction(overlap=True)},
    "reduction.layout='leaf'": {"reduction": jddp.Reduction(layout="leaf")},
    "reduction.wire_dtype='float16'": {"reduction": jddp.Reduction(wire_dtype="float16")},
    "batch_norm='local'": {"batch_norm": "local"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=f"fsdp and {name}.* cannot be combined: "):
        wrapped(Net(), strategy="fsdp", **REFUSED[name])


def on_the_host(call):
    """A model that calls the host with rows and with a parameter."""

    def body(m, x):
        w = m.param("w", nn.initializers.normal(), (4, 4))
        shown = call(jax.lax.stop_gradient(x)), call(jax.lax.stop_gradient(w))
        return (x @ w).sum(1) * (1.0 if shown[0] is None else shown[0].sum() + shown[1].sum())

    return Of(body)


def doubled(x):
    return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.typeof(x), x)


def doubled_with_an_effect(x):
    return io_callback(lambda x: 2 * np.asarray(x), jax.typeof(x), x)


GROUPS = jddp.FSDP(group_size=2)


@pytest.mark.parametrize(
    ("call", "strategy"),
    [(doubled, "fsdp"), (doubled_with_an_effect, jddp.FSDP(regather=False))],
)
def test_callbacks_with_results_are_those_of_replicated_parameters(call, strategy):
    make = functools.partial(wrapped, on_the_host(call), mesh=4)
    both(make, [make_rows(seed=i) for i in range(2)], strategy=strategy)


@pytest.mark.parametrize(
    ("call", "strategy"), [(doubled_with_an_effect, "fsdp"), (doubled, GROUPS)]
)
def test_a_callback_that_jax_cannot_compile_is_refused_by_name(call, strategy):
    ddp = wrapped(on_the_host(call), strategy=strategy, mesh=4)
    state = start(ddp, make_rows())
    with pytest.raises(ConfigError, match=r"_callback cannot be combined here.*regather=False"):
        ddp.step(state, make_rows())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", GROUPS], ids=["ddp", "fsdp", "groups"])
def test_a_debugging_callback_is_called_once_for_each_replica(strategy):
    seen = []
    show = functools.partial(jax.debug.callback, lambda x: seen.append(x.shape))
    ddp = wrapped(on_the_host(show), strategy=strategy, mesh=4)
    state = start(ddp, make_rows())
    jax.effects_barrier()
    seen.clear()
    jax.block_until_ready(ddp.step(state, make_rows()))
    jax.effects_barrier()
    assert len(seen) == 2 * 4


def test_one_device_is_ddp_which_is_said(caplog):
    ddp = wrapped(Net(), strategy="fsdp", mesh=1)
    assert "'fsdp' on one device is 'ddp'" in caplog.text
    take_steps(ddp, [make_rows()])
