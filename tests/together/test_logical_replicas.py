"""A step on logical replicas is bitwise identical on any number of devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from judge import BUCKET_MB, assert_close, host, sent
from models import GALLERY
from tiny import MODELS, NUM_CLASSES, loss_fn, make_batch

import jddp
from jddp.errors import ConfigError

SHARDS = 8
BATCHES = [make_batch(32, seed=i) for i in range(2)]
PARTIAL = [make_batch(13, seed=9), make_batch(5, seed=8)]


@pytest.fixture
def as_users_compile():
    """Undoes what the other tests ask of JAX: what is fused may change bits."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def wrapped(num, model=None, loss=loss_fn, **options):
    options = {"optimizer": optax.adam(1e-2), "logical_replicas": SHARDS, **options}
    options = {"batch_norm": "local", "bucket_mb": BUCKET_MB, **options}
    model, optimizer = model or MODELS["mlp"](dropout_rate=0.2), options.pop("optimizer")
    return jddp.DataParallel(model, optimizer, loss, mesh=num, **options)


def trained(num, batches=BATCHES, evaluated=PARTIAL, **options):
    """All that a run says and keeps: the state, the metrics of each step, an evaluation."""
    ddp = wrapped(num, **options)
    state, said = ddp.init(3, batches[0]), []
    for batch in batches:
        state, metrics = ddp.step(state, batch)
        said.append(metrics)
    said.append(ddp.evaluate(state, evaluated))
    return host(jax.tree.map(words, (state, said)))


def words(x):
    is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def bits(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}


def assert_same_bits(numbers=(1, 2, 8), **options):
    want, *others = (bits(trained(num, **options)) for num in numbers)
    for num, got in zip(numbers[1:], others, strict=True):
        assert got.keys() == want.keys()
        assert [path for path in want if got[path] != want[path]] == [], num


def test_state_metrics_and_evaluation_are_bitwise_equal(as_users_compile):
    assert_same_bits((1, 4))


class Layers(nn.Module):
    function: Callable[[jax.Array, bool], jax.Array]

    @nn.compact
    def __call__(self, x, train):
        return self.function(x, train)


def softmax(x, train):
    return nn.Dense(NUM_CLASSES)((nn.softmax(nn.Dense(8)(x)) * x).sum(1))


@jax.jit
def masked_mean(x, mask):
    return (x * mask).sum(0) / mask.sum()


def centred(x, train):
    """Minus a masked mean over rows: a scalar divides once forward and once backward."""
    hidden, mask = nn.Dense(8)(x.reshape(len(x), -1)), (x[:, 0, :1] > 0).astype(jnp.float32)
    return nn.Dense(NUM_CLASSES)(hidden - masked_mean(hidden, mask)[None])


def attention(x, train):
    attend = nn.MultiHeadDotProductAttention(2, dropout_rate=0.2, deterministic=not train)
    return nn.Dense(NUM_CLASSES)((x + attend(nn.LayerNorm()(x))).mean(1))


def convolutions(x, train):
    x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x[..., None])), (2, 2), (2, 2))
    return nn.Dense(NUM_CLASSES)(nn.relu(nn.Conv(8, (3, 3), strides=(2, 2))(x)).mean((1, 2)))


def local_batch_norm(x, train):
    x = x[..., None]
    for _ in range(2):
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
    return nn.Dense(NUM_CLASSES)(x.mean((1, 2)))


def tied_embedding(x, train):
    embed = nn.Embed(NUM_CLASSES, 8)
    tokens = (x[..., 0] > 0).astype(jnp.int32) + 2 * (x[..., 1] > 0)
    return embed.attend(nn.relu(nn.Dense(8)(embed(tokens))).mean(1))


def last(x):
    return nn.Dense(NUM_CLASSES)(x)


LAYERS = {f.__name__: f for f in (softmax, centred, attention, convolutions)}
LAYERS |= {f.__name__: f for f in (local_batch_norm, tied_embedding)} | {
    "layer_norm": lambda x, train: last(nn.tanh(nn.LayerNorm()(nn.Dense(8)(x))).mean(1)),
    "group_norm": lambda x, train: last(nn.relu(nn.GroupNorm(2)(nn.Dense(8)(x))).mean(1)),
    "gelu": lambda x, train: last(nn.gelu(nn.Dense(16)(x)).mean(1)),
    "lstm": lambda x, train: last(nn.RNN(nn.OptimizedLSTMCell(8))(x)[:, -1]),
}


OTHERS = ["scanned_transformer", "lstm_tagger", "resnet_nnx", "seq2seq"]


def make_sequences(rows, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 12, 8)).astype(np.float32)
    return {"x": x, "y": make_batch(rows, seed=seed)["y"]}


SEQUENCES = {
    "batches": [make_sequences(32, seed=i) for i in range(2)],
    "evaluated": [make_sequences(13, seed=9)],
}


# On one device XLA merged equal operations later than on several, so that divisions by these sums
# became multiplications on one of them.
@pytest.mark.parametrize("function", [softmax, centred], ids=lambda f: f.__name__)
def test_gradients_of_a_division_by_a_sum_are_bitwise_equal_on_one_device(
    function, as_users_compile
):
    batch, found = make_sequences(96), []
    for num in (1, 2):
        ddp = wrapped(num, Layers(function), optimizer=optax.sgd(0.1))
        found.append(bits(ddp.gradients(ddp.init(3, batch), batch)))
    assert found[0] == found[1]


def long_but(names, *some):
    """All names, of which only some are not long."""
    return [pytest.param(x, marks=[pytest.mark.long] * (x not in some)) for x in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(LAYERS, "attention", "convolutions", "local_batch_norm"))
def test_every_kind_of_layer_is_bitwise_equal_on_one_to_eight_devices(name, as_users_compile):
    assert_same_bits(model=Layers(LAYERS[name]), **SEQUENCES)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(OTHERS, "scanned_transformer"))
def test_models_of_others_are_bitwise_equal_on_one_to_eight_devices(name, as_users_compile):
    example = GALLERY[name]
    assert_same_bits(
        model=example.model(),
        loss=example.loss_fn,
        batches=[example.make_batch(32, seed) for seed in range(2)],
        evaluated=[example.make_batch(32, 9)],
    )


@pytest.mark.slow
def test_a_run_moved_from_eight_devices_to_one_and_to_four_ends_with_the_same_bits(
    tmp_path, as_users_compile
):
    def params(folder, worlds):
        for num, num_steps in worlds:
            ddp = wrapped(num, Layers(attention))
            run = ddp.fit(SEQUENCES["batches"] * 3, num_steps=num_steps, run_dir=tmp_path / folder)
        return bits(run.state.params)

    moved = params("moved", [(8, 2), (1, 4), (4, 6)])
    assert moved == params("stayed", [(8, 6)])


CLIPPED = {"max_grad_norm": 0.1, "ema_decay": 0.9, "skip_nonfinite": True}
MASKED = [make_batch(32, seed=i, masked=True) for i in range(2)]
OF_24 = [make_batch(24, seed=i) for i in range(2)]
OPTIONS = {
    "parts, clipping, an average": {"accumulate_steps": 2, **CLIPPED},
    "a mask, flat buckets": {"batches": MASKED, "layout": "flat"},
    "a loss scale": {"loss_scale": "dynamic", "model": MODELS["mlp"](dtype=jnp.float16)},
    "momentum": {"optimizer": optax.sgd(0.1, momentum=0.9)},
    "no power of two": {"numbers": (1, 3, 4), "batches": OF_24, "logical_replicas": 12},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", long_but(OPTIONS, "parts, clipping, an average", "no power of two")
)
def test_so_they_are_with_every_option(name, as_users_compile):
    assert_same_bits(**OPTIONS[name])


def test_as_many_shards_as_devices_are_the_replicas_that_there_always_were():
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "model": MODELS["conv"](dropout_rate=0.2)}
    ordered, plain = (trained(8, **options, logical_replicas=n) for n in (8, None))
    # The same keys and statistics; the mean in another order.
    for got, want in zip(ordered, plain, strict=True):
        assert_close(got, want, rtol=1e-5)


@pytest.mark.parametrize("layout", ["leaf", "flat"])
def test_the_bytes_are_those_of_a_ring(layout):
    ddp = wrapped(4, layout=layout)
    state = ddp.init(0, BATCHES[0])
    gradients = [x for x in sent(ddp, BATCHES[0]) if "bucket_" in x.op_name]
    padded = sum(4 * -(-x.size // 4) for x in jax.tree.leaves(state.params))
    for op in ("all-to-all", "all-gather"):
        assert sum(x.num_elements for x in gradients if x.op == op) == padded
    assert {x.op for x in gradients} == {"all-to-all", "all-gather"}
    if layout == "flat":
        assert len(gradients) == 2 * len(ddp.plan)


def test_statistics_are_each_shards_own():
    ddp = wrapped(2, MODELS["conv"]())
    state, _ = ddp.step(ddp.init(0, BATCHES[0]), BATCHES[0])
    mean = np.asarray(state.model_state["batch_stats"]["BatchNorm_0"]["mean"])
    assert mean.shape == (SHARDS, 4)
    assert len(np.unique(mean[:, 0])) == SHARDS
    read = ddp.model(state)["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(read, mean.mean(0), rtol=1e-6)


def meeting(model, batch, train):
    losses, metrics = loss_fn(model, batch, train)
    return losses - lax.pmean(losses.mean(), jddp.AXIS), metrics


HOOK = jddp.CommHook(lambda plan: (), lambda b, s, axis: (b, s))
REFUSED = [
    ({"logical_replicas": 6}, "6 logical_replicas do not divide over 4 devices. .*: 4 and 8"),
    ({"wire_dtype": "bfloat16"}, "wire_dtype cannot be combined: sums on the wire would round"),
    ({"comm_hook": HOOK}, "comm_hook cannot be combined: gradients are added in one order"),
    ({"overlap": True}, "overlap cannot be combined: gradients of several replicas"),
    ({"shard_optimizer": True}, "computed in other vectors"),
    ({"local_steps": jddp.LocalSteps(every=2)}, "local steps depend on the number of devices"),
    ({"model": MODELS["conv"](), "batch_norm": "sync"}, "choose batch_norm='local'"),
    ({"loss": meeting}, "this model or loss has a collective, 'psum"),
]


def test_what_would_change_bits_is_refused():
    for options, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            wrapped(4, **options).init(0, BATCHES[0])
    ddp = wrapped(4)
    state = ddp.init(0, BATCHES[0])
    with pytest.raises(ConfigError, match="12 rows do not divide over 8 logical replicas"):
        ddp.step(state, make_batch(12))


@pytest.mark.parametrize("dropout_rate", [0.0, 0.2])
def test_verify_holds_it_against_one_device(dropout_rate):
    model, options = MODELS["mlp"](dropout_rate=dropout_rate), {"logical_replicas": SHARDS}
    report = jddp.verify(model, optax.sgd(0.1), loss_fn, BATCHES[0], mesh=4, **options)
    assert report.passed, str(report)
    assert all(comparison.error == 0 for comparison in report.comparisons), str(report)
