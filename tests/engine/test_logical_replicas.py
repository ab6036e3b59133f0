"""A step on logical replicas is bitwise identical on any number of devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from judge import BUCKET_MB, host, joined, sent
from models import GALLERY
from sweeps import swept
from tiny import MODELS, Of, loss_fn, make_batch

import jddp
from jddp.ground.errors import ConfigError
from jddp.zoo.losses import next_token
from jddp.zoo.models import GPT

SHARDS = 8
BATCHES = [make_batch(32, seed=i) for i in range(2)]
PARTIAL = [make_batch(13, seed=9), make_batch(5, seed=8)]


def wrapped(num, model=None, loss=loss_fn, **options):
    options = {"optimizer": optax.adam(1e-2), "strategy": jddp.LogicalReplicas(SHARDS), **options}
    options = joined(
        {"batch_norm": "local", "reduction": jddp.Reduction(bucket_mb=BUCKET_MB)}, options
    )
    model, optimizer = model or MODELS["mlp"](dropout_rate=0.2), options.pop("optimizer")
    return jddp.DataParallel(model, optimizer, loss, mesh=num, **options)


@pytest.fixture
def as_users_compile():
    """Undoes what the other tests ask of JAX: what is fused may change bits."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def trained(num, batches=BATCHES, evaluated=PARTIAL, **options):
    """All that a run says and keeps: the state, the metrics of each step, an evaluation."""
    ddp = wrapped(num, **options)
    state, said = ddp.init(3, batches[0]), []
    for batch in batches:
        state, metrics = ddp.step(state, batch)
        said.append(metrics)
    state = state.replace(key=jax.random.key_data(state.key))
    return host((state, said, ddp.evaluate(state, evaluated)))


def bits(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}


def assert_same_bits(numbers=(1, 2, 8), **options):
    want, *others = (bits(trained(num, **options)) for num in numbers)
    for num, got in zip(numbers[1:], others, strict=True):
        assert got.keys() == want.keys()
        assert [path for path in want if got[path] != want[path]] == [], num


MOMENTUM = optax.sgd(0.1, momentum=0.9)
NAMES = "adafactor adam adamw lamb lion novograd rmsprop sm3"
OPTIMIZERS = {name: getattr(optax, name)(1e-2) for name in NAMES.split()} | {
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "clipped momentum": optax.chain(optax.clip_by_global_norm(0.1), MOMENTUM),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
}
OFTEN = ("adam", "lamb", "nesterov")
ALL = [x if x in OFTEN else pytest.param(x, marks=pytest.mark.long) for x in OPTIMIZERS]
ODD = {"model": Of(lambda m, x: nn.Dense(5)(x)), "loss": lambda m, b: jnp.square(m(b["x"])).sum(-1)}


def optimizer_fusions(num):
    """Operations of each fused computation of the compiled step that has some of the optimizer."""
    text = wrapped(num, optimizer=MOMENTUM, **ODD).steps.lower(BATCHES[0]).compile().as_text()
    bodies = re.findall(r"^%?\S*fused\S* [^\n]*\{\n(.*?)^\}", text, re.S | re.M)
    fused = [body for body in bodies if "optimizer_update" in body]
    return sorted(sorted(re.findall(r"= \S+ ([\w-]+)\(", body)) for body in fused)


# Which product of `gradient / count + momentum * 0.9` is rounded depended on what it was fused
# with, though not on every processor.
@pytest.mark.slow
def test_the_optimizer_is_compiled_alike_and_with_nothing_else_on_two_devices(as_users_compile):
    one, two = map(optimizer_fusions, (1, 2))
    assert one == two != []
    assert not any("slice" in operations for operations in one)


@pytest.mark.parametrize("name", ALL)
def test_any_optimizer_is_bitwise_equal_with_odd_sizes(name, as_users_compile):
    numbers = (1, 8) if name in OFTEN else (1, 2, 4, 8)
    assert_same_bits(numbers, optimizer=OPTIMIZERS[name], evaluated=BATCHES, **ODD)


OPTIONS = {
    "parts, clipping, an average": {"accumulate_steps": 2, "max_grad_norm": 0.1, "ema_decay": 0.9},
    "no power of two": {"numbers": (1, 3, 4), "rows": 24, "strategy": jddp.LogicalReplicas(12)},
    "a mask, flat buckets": {"masked": True, "reduction": jddp.Reduction(layout="flat")},
    "a loss scale": {
        "precision": jddp.Precision(loss_scale="dynamic"),
        "model": MODELS["mlp"](dtype=jnp.float16),
    },
    "momentum": {"optimizer": MOMENTUM, "skip_nonfinite": True},
    **{name: {"model": MODELS[name](dropout_rate=0.2)} for name in MODELS},
}
OF_OTHERS = ["scanned_transformer", "moe"]
QUICK = ["mlp", "conv", "scanned_transformer", "parts, clipping, an average", "no power of two"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.long)
        for name in (*OPTIONS, *OF_OTHERS)
    ],
)
def test_state_metrics_and_evaluation_are_bitwise_equal(name, as_users_compile):
    if name in OF_OTHERS:
        example = GALLERY[name]
        *batches, evaluated = (example.make_batch(32, seed) for seed in (0, 1, 9))
        options = {"batches": batches, "evaluated": [evaluated]}
        assert_same_bits(model=example.model(), loss=example.loss_fn, **options)
    else:
        options = dict(OPTIONS[name])
        rows, masked = options.pop("rows", 32), options.pop("masked", False)
        batches = [make_batch(rows, seed=seed, masked=masked) for seed in range(2)]
        assert_same_bits(batches=batches, **options)


@pytest.mark.slow
def test_a_run_moved_from_eight_devices_to_one_and_to_four_ends_with_the_same_bits(
    tmp_path, as_users_compile
):
    def params(folder, worlds):
        for num, num_steps in worlds:
            ddp = wrapped(num, MODELS["transformer"](dropout_rate=0.2))
            run = jddp.fit(ddp, BATCHES * 3, num_steps=num_steps, run_dir=tmp_path / folder)
        return bits(run.state.params)

    assert params("moved", [(8, 2), (1, 4), (4, 6)]) == params("stayed", [(8, 6)])


@pytest.mark.parametrize("layout", swept(["leaf", "flat"], every=2))
def test_the_bytes_are_those_of_a_ring(layout):
    ddp = wrapped(4, reduction=jddp.Reduction(layout=layout))
    gradients = [x for x in sent(ddp, BATCHES[0]) if "bucket_" in x.op_name]
    padded = sum(4 * -(-x.size // 4) for x in jax.tree.leaves(ddp.init(0, BATCHES[0]).params))
    for op in ("all-to-all", "all-gather"):
        assert sum(x.num_elements for x in gradients if x.op == op) == padded
    assert {x.op for x in gradients} == {"all-to-all", "all-gather"}
    if layout == "flat":
        assert len(gradients) == 2 * len(ddp.plan)


def meeting(model, batch, train):
    losses, metrics = loss_fn(model, batch, train)
    return losses - lax.pmean(losses.mean(), jddp.AXIS), metrics


def test_what_would_change_bits_is_refused():
    """Pairs of options are in test_random_options.py."""
    with pytest.raises(ConfigError, match="number is at least 1; got 0"):
        jddp.LogicalReplicas(0)
    for options, message in (
        ({"strategy": jddp.LogicalReplicas(6)}, "6 LogicalReplicas do not divide.*: 4 and 8"),
        ({"model": MODELS["conv"](), "batch_norm": "sync"}, "choose batch_norm='local'"),
        ({"loss": meeting}, "a collective, 'psum"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrapped(4, **options).init(0, BATCHES[0])
    ddp = wrapped(4)
    state = ddp.init(0, BATCHES[0])
    with pytest.raises(ConfigError, match="12 rows do not divide over 8 logical replicas"):
        ddp.step(state, make_batch(12))


def test_a_loss_in_tiles_is_refused_and_all_logits_at_once_are_not():
    model = GPT(vocab_size=24, num_layers=1, num_heads=2, width=16, max_length=8)
    batch = {"tokens": np.arange(16 * 9, dtype=np.int32).reshape(16, 9) % 24}
    with pytest.raises(ConfigError, match="tile_size"):
        wrapped(8, model=model, loss=next_token).steps.lower(batch)
    wrapped(8, model=model, loss=functools.partial(next_token, tile_size=None)).steps.lower(batch)
