"""N devices equal one device on the whole batch: strategies, models, worlds and options."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from judge import STRATEGIES, hold, host, joined, wrapped
from models import GALLERY
from tiny import MODELS, Of, loss_fn, make_batch, take_steps

import jddp

OPTIONS = {
    "plain": {},
    "parts": {"accumulate_steps": 2},
    "clipped": {"max_grad_norm": 0.5, "ema_decay": 0.25},
    "narrow": {"reduction": "bfloat16"},
}
SETTINGS = {
    "model": list(MODELS),
    "strategy": list(STRATEGIES),
    "replicas": [8, 2, 4, 1],
    "options": list(OPTIONS),
    "dtype": ["float32", "bfloat16"],
    "masked": [False, True],
    "dropout": [0.0, 0.3],
}


def is_one_device(model, strategy, replicas, options, dtype, masked, dropout):
    """Whether one device is the judge: of parts and of logical replicas, not for batch norms."""
    if model in ("conv", "nnx") and (options == "parts" or strategy == "logical"):
        return False
    if strategy == "logical" and options == "narrow":
        return False  # refused
    return strategy != "groups" or replicas > 1


def covering(settings):
    """A few cases in which all values of any two settings stand once together."""
    product = filter(lambda case: is_one_device(*case), itertools.product(*settings.values()))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in product}
    missing = set().union(*pairs.values())
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        missing -= pairs.pop(best)
        yield best


# Sums of 16 rows in another order; a replica rounds its share's gradient to 8 bits where one device
# rounds the whole batch's once.
ROUNDING = {"float32": 1e-5, "bfloat16": 2**-6}
CASES = {"-".join(map(str, case)): case for case in covering(SETTINGS)}
OFTEN = [*CASES][::5]


@pytest.mark.parametrize(
    list(SETTINGS),
    [
        pytest.param(*case, id=name, marks=[] if name in OFTEN else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_n_devices_equal_one_device_for_every_pair_of_settings(
    model, strategy, replicas, options, dtype, masked, dropout
):
    # Buckets of 200 bytes: several, with leaves larger than one.
    small = {"mesh": replicas, "reduction": jddp.Reduction(bucket_mb=200 / 2**20)}
    hold(
        MODELS[model](dtype=jnp.dtype(dtype), dropout_rate=dropout),
        loss_fn,
        [make_batch(seed=seed, masked=masked) for seed in range(2)],
        begin=lambda ddp, batch: ddp.init(1, batch),
        optimizer=optax.sgd(0.5, momentum=0.9),
        rtol=ROUNDING["bfloat16" if options == "narrow" else dtype],
        **joined(small, STRATEGIES[strategy], OPTIONS[options]),
    )


# Statistics and random numbers beside parameters, and parameters of two names; scanned layers.
QUICK = [("vae", "flat-ready"), ("tied_autoencoder", "flat-ready"), ("scanned_transformer", "fsdp")]
OTHERS = {("moe", "zero1"), ("moe", "fsdp"), ("moe", "groups")}


def mark_of(example, strategy):
    if (example, strategy) in QUICK:
        return []
    is_slow = strategy == "flat-ready" or (example, strategy) in OTHERS
    return pytest.mark.slow if is_slow else pytest.mark.long


@pytest.mark.parametrize(
    "example, strategy",
    [
        pytest.param(*case, marks=mark_of(*case))
        for case in itertools.product(GALLERY, STRATEGIES)
        if case[1] not in ("fsdp kept", "logical")
    ],
)
def test_a_model_of_others_trains_on_eight_devices_as_on_one(example, strategy):
    model, loss = GALLERY[example].model(), GALLERY[example].loss_fn
    options = {"mesh": 8, "reduction": jddp.Reduction(bucket_mb=2**-10)}
    batches = [GALLERY[example].make_batch(16, seed) for seed in range(2)]
    hold(
        model,
        loss,
        batches,
        begin=lambda ddp, batch: ddp.init(0, batch),
        **joined(options, STRATEGIES[strategy]),
    )


@pytest.mark.parametrize("masked", [False, True])
def test_whole_numbers_are_bitwise_equal_with_any_strategy_on_any_number_of_devices(masked):
    numbers = np.random.default_rng(0).integers(-3, 4, (32, 8)).astype(np.float32)
    batch, ends = {"x": numbers[:, :4], "y": numbers[:, 4:]}, []
    if masked:
        batch["mask"] = np.arange(32) % 8 < 4  # 16 rows, unevenly spread over replicas
    linear = Of(lambda m, x: nn.Dense(4, kernel_init=nn.initializers.ones)(x))
    strategies = ["leaf-end", "flat-ready", "fsdp", "groups"]
    cases = [(1, "leaf-end"), *itertools.product((2, 4, 8), strategies)]
    for num, strategy in cases:
        ddp = wrapped(
            linear,
            lambda model, batch: 0.5 * (model(batch["x"]) - batch["y"]) ** 2,
            optimizer=optax.sgd(1.0),
            **joined({"mesh": num}, STRATEGIES[strategy]),
        )
        state, metrics = take_steps(ddp, [batch])
        ends.append(host((state.params, metrics)))
        jax.tree.map(np.testing.assert_array_equal, ends[-1], ends[0])


def drawn(m, x):
    """Parameters by many initializers, of shapes whose parts end in the middle of a vector."""
    for name in ("lecun_normal", "orthogonal", "normal", "uniform", "xavier_uniform"):
        for rows, width in ((8, 5), (72, 33), (15, 8)):
            initializer = getattr(nn.initializers, name)()
            x = x + m.param(f"{name}_{rows}_{width}", initializer, (rows, width)).sum()
    return x.sum(-1)


def test_a_seed_gives_the_same_bits_with_any_strategy_on_any_number_of_devices():
    worlds = {"leaf-end": (1,), "zero1": (8,), "fsdp": (8, 3), "groups": (8,), "logical": (4,)}
    batch, found = {"x": np.ones((24, 4), np.float32)}, []
    for strategy, num in ((name, num) for name, nums in worlds.items() for num in nums):
        options = joined({"mesh": num}, STRATEGIES[strategy])
        ddp = wrapped(Of(drawn), lambda model, batch: model(batch["x"]), **options)
        found.append(host(ddp.init(0, batch).params))
        jax.tree.map(np.testing.assert_array_equal, found[-1], found[0])
