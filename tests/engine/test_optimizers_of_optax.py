"""Every optimizer with each strategy that divides its state; what its equations say; groups."""

import contextlib
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import judge
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from judge import Net, assert_close, hold, host, make_rows, squares, start, wrapped
from states import close
from sweeps import swept
from tiny import Of

import jddp
from jddp.checkpoint.checkpoints import CheckpointFolder
from jddp.config.files import load_config
from jddp.engine.optimizer import mixes_elements
from jddp.ground.errors import ConfigError
from jddp.reduce.shards import AlongDim, Flat, Groups
from jddp.trainer.job.parts import optimizer_of
from jddp.zoo.optimizers import ParameterGroup, by_group, decay_mask

ROOT = Path(__file__).resolve().parents[2]
# Made of the namespace of optax: a new optimizer fails here until it has arguments there.
OF_OPTAX = runpy.run_path(str(ROOT / "docs" / "optimizers.py"))
NEEDS_MORE = "refused, with `ddp` too"
# Adam and its kin divide by roots of what is small, and Newton-Schulz multiplies the small singular
# values of a gradient by hundreds, and with them the rounding of sums in another order: of what
# parameters move by, which is a tenth of them.
ROUNDING = 1e-4
LAYERS = 3  # which four replicas do not divide


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(judge.WIDTH, use_bias=False)(nn.tanh(nn.Dense(8)(x))), None


class Deep(nn.Module):
    is_scanned: bool

    @nn.compact
    def __call__(self, x):
        if self.is_scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(Block, length=LAYERS, **axes)(name="layers")(x, None)
        else:
            for _ in range(LAYERS):
                x, _ = Block()(x, None)
        return nn.Dense(1, name="last")(x)[:, 0]


def matrices(params):
    """The last two dims of kernels: Adam updates all else."""
    dims = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: dims if "kernel" in jax.tree_util.keystr(path) else None, params
    )


def muon(**options):
    return optax.contrib.muon(
        0.05, weight_decay=0.1, muon_weight_dimension_numbers=matrices, eps=1e-3, **options
    )


def shampoo():
    """Multiplies G by the sum of G Gᵀ, which it keeps: a square array for each matrix."""

    def init(params):
        return jax.tree.map(
            lambda x: jnp.zeros((*x.shape[:-1], x.shape[max(x.ndim - 2, 0)])), params
        )

    def update(grads, kept, params=None):
        def add(g, square):
            return square + (g * g if g.ndim == 1 else g @ jnp.swapaxes(g, -1, -2))

        def step(g, square):
            if g.ndim == 1:
                return -0.1 * square * g / (1 + square)
            scale = 1 + jnp.trace(square, axis1=-2, axis2=-1)
            return -0.1 * square @ g / scale[..., None, None]

        kept = jax.tree.map(add, grads, kept)
        return jax.tree.map(step, grads, kept), kept

    return optax.GradientTransformation(init, update)


def of_each(function):
    """A function of parameters, which is one of each array."""
    return lambda params: jax.tree.map(function, params)


LAST = {"head": ParameterGroup(["last/.*"], optax.sgd(0.1, momentum=0.9))}
OWN = {
    "adamw with a mask": optax.adamw(1e-2, weight_decay=0.1, mask=decay_mask),
    "adamw with a mask by size": optax.adamw(0.05, eps=1e-3, mask=of_each(lambda x: x.size > 9)),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "a schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 4), eps=1e-3),
    "muon": muon(),
    "two in one": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()},
        of_each(lambda x: "a" if x.ndim > 1 else "b"),
    ),
    "hyperparameters in the state": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "a plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "steps of muon": optax.MultiSteps(muon(), 2),
    "groups": by_group(LAST, optax.adam(1e-2)),
    "muon and parameters that stay": optax.partition(
        {"moved": muon(), "kept": optax.set_to_zero()},
        lambda params: {name: "kept" if name == "last" else "moved" for name in params},
    ),
    "muon of another first step": muon(preconditioning="schatten"),
    "muon with a rate in its state": optax.inject_hyperparams(
        lambda learning_rate: optax.chain(muon(), optax.scale_by_learning_rate(learning_rate))
    )(learning_rate=-0.5),
    "shampoo": shampoo(),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
}
OPTIMIZERS = OWN | OF_OPTAX["optimizers"]()
CASES = [(name, strategy) for name in OPTIMIZERS for strategy in ("ddp", "zero1", "fsdp")]


@pytest.mark.parametrize(("name", "strategy"), swept(CASES, every=25))
def test_an_optimizer_is_that_of_one_device_or_refused(name, strategy):
    tx, batches = OPTIMIZERS[name], [make_rows(24, seed=i) for i in range(4)]
    options = {"optimizer": tx, "strategy": strategy, "mesh": 4}
    model = Deep(True) if name in OWN else Net()
    with jax.numpy_rank_promotion("allow"):
        if name not in OWN and OF_OPTAX["outcome"](tx).startswith(NEEDS_MORE):
            with pytest.raises(ConfigError, match="average_gradients|LocalSteps"):
                start(wrapped(model, **options), batches[0])
        else:
            hold(model, squares, batches, rtol=ROUNDING, **options)


def test_a_step_gives_no_loss_to_an_optimizer_that_does_not_take_it():
    sam = OPTIMIZERS["contrib.sam"]
    for tx in (sam, optax.chain(sam, optax.scale(0.5))):
        assert OF_OPTAX["outcome"](tx) == "its shard of each parameter"


@pytest.mark.parametrize("name", ["lbfgs", "contrib.sophia", "contrib.dpsgd", "monitor"])
def test_an_optimizer_that_needs_more_than_a_step_has_is_refused_in_one_line(name):
    with pytest.raises(ConfigError, match=r"the loss: .*average_gradients") as error:
        start(wrapped(Net(), optimizer=OPTIMIZERS[name], mesh=2), make_rows())
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("is_scanned", swept([True, False], every=2))
@pytest.mark.parametrize("strategy", ["zero1", "fsdp", jddp.FSDP(group_size=2)], ids=str)
def test_matrices_in_parts_are_updated_as_whole_ones(strategy, is_scanned):
    """With micro-batches, clipping and an average; each group gathers its own."""
    options = {"max_grad_norm": 0.1, "ema_decay": 0.5, "accumulate_steps": 2, "mesh": 4}
    options |= {"optimizer": muon(), "strategy": strategy, "rtol": ROUNDING}
    hold(Deep(is_scanned), squares, [make_rows(24, seed=i) for i in range(3)], **options)


def of_all_shapes(m, x):
    number = m.param("number", nn.initializers.ones, ())
    m.param("empty", nn.initializers.ones, (0, 4))
    odd, one = (m.param(str(n), nn.initializers.normal(1.0), (n,)) for n in (3, 1))
    row = m.param("row", nn.initializers.normal(1.0), (1, 8))
    return (nn.Dense(3)(x) * number + odd + one).sum(1) + (nn.Dense(8)(x) * row).sum(1)


FOUR, TWO = jddp.FSDP(group_size=4), jddp.FSDP(group_size=2)
ODD = Of(of_all_shapes)
ALL_WAYS = [("zero1", 8), ("fsdp", 4), (FOUR, 8), ("ddp", 2), (TWO, 8), ("zero1", 3), ("fsdp", 3)]
MOVES = {
    "odd shapes": (ODD, optax.adam(1e-2, eps=1e-3), [("fsdp", 4), ("zero1", 4), ("fsdp", 4)]),
    "adam": (ODD, optax.adam(1e-2, eps=1e-3), [*ALL_WAYS, (FOUR, 8), ("zero1", 2), (TWO, 4)]),
    "muon": (Deep(True), muon(), ALL_WAYS),
    "shampoo": (Deep(True), shampoo(), ALL_WAYS),
}


@pytest.mark.parametrize(
    "model, tx, ways",
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name != "odd shapes"))
        for name, case in MOVES.items()
    ],
)
def test_a_checkpoint_resumes_with_any_strategy_on_any_number_of_devices(tmp_path, model, tx, ways):
    def made(strategy, num):
        ddp = wrapped(model, optimizer=tx, mesh=num, strategy=strategy)
        return ddp, start(ddp, make_rows(24))

    with jax.numpy_rank_promotion("allow"):
        alone, state = made("ddp", 1)
        for step, (strategy, num) in enumerate(ways):
            ddp, moving = made(strategy, num)
            with contextlib.closing(CheckpointFolder(tmp_path, keep=2)) as checkpoints:
                if step:
                    shardings = [x.sharding for x in jax.tree.leaves(moving)]
                    moving = checkpoints.restore(moving, ddp.steps.layouts(moving)).state
                    assert [x.sharding for x in jax.tree.leaves(moving)] == shardings
                moving, _ = ddp.step(moving, make_rows(24, seed=step))
                state, _ = alone.step(state, make_rows(24, seed=step))
                checkpoints.save(step + 1, moving, {}, ddp.steps.layouts(moving))
            whole = judge.on_one_device(moving, state.opt_state)
            for got, want in ((whole.params, state.params), (whole.opt_state, state.opt_state)):
                assert_close(host(got), host(want), rtol=ROUNDING)
        other = wrapped(model, optimizer=optax.sgd(0.1, momentum=0.9), mesh=4)
        like = start(other, make_rows(24))
        with pytest.raises(ConfigError, match="optimizer"):
            CheckpointFolder(tmp_path, keep=1).restore(like, other.steps.layouts(like))


def of_matrix(function):
    """A transformation of the matrix "a", by a number `d` that it keeps."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()),
        lambda grads, d, params=None: ({**grads, "a": function(grads["a"], d)}, d + 1),
    )


IN_PARTS = {
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "clip": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "a choice by each element": of_matrix(lambda x, d: jnp.where(x > d, x, d)),
    "a choice by a number": of_matrix(lambda x, d: jax.lax.cond(d > 0, lambda: -x, lambda: x)),
    "jitted": of_matrix(lambda x, d: jax.jit(jnp.tanh)(x) + jax.jit(lambda z: z * d)(x)),
    "arrays of one number": of_matrix(lambda x, d: jnp.full(x.shape, d) + jnp.zeros_like(x)),
    "a derivative of its own": of_matrix(lambda x, d: jax.nn.relu(x) + jax.checkpoint(jnp.tanh)(x)),
}
WHOLE = {
    "muon": optax.contrib.muon(0.1),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "a mask by size": optax.adamw(0.1, mask=of_each(lambda x: x.size > 20)),
    "shapes written down": of_matrix(lambda x, d: x.reshape(2, 12).reshape(4, 6)),
    "a number of the shape": of_matrix(lambda x, d: x * sum(x.shape)),
    "the length of a loop": of_matrix(
        lambda x, d: x + jax.lax.fori_loop(0, sum(x.shape), lambda i, d: d * 2, d)
    ),
    "reduce_sum": of_matrix(lambda x, d: x / jnp.sqrt((x**2).sum())),
    "dot_general": of_matrix(lambda x, d: x @ jnp.ones((6, 6))),
    "cumsum": of_matrix(lambda x, d: jnp.cumsum(x, axis=0)),
    "rev": of_matrix(lambda x, d: x[::-1]),
    "iota": of_matrix(lambda x, d: x + jax.lax.iota(x.dtype, 24).reshape(x.shape)),
    "constant": of_matrix(lambda x, d: x * np.ones((4, 6), np.float32)),
    "in a branch": of_matrix(lambda x, d: jax.lax.cond(d > 0, lambda: x, lambda: x[::-1])),
}


@pytest.mark.parametrize("division", [Flat("data", 2), AlongDim("data", Groups(2))])
def test_an_optimizer_needs_whole_arrays_unless_it_updates_each_element_by_itself(division):
    """Parts may have one shape where the arrays have two."""
    sizes = {"a": (4, 6), "b": (6, 4), "c": (5,), "d": ()}
    shapes = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in sizes.items()}
    found = [
        name for name, tx in (IN_PARTS | WHOLE).items() if mixes_elements(tx, shapes, division)
    ]
    assert found == [*WHOLE]


def test_the_first_group_that_matches_has_the_parameter():
    rates = [("one", ["a"], 1.0), ("two", ["a|b"], 2.0)]
    groups = {name: ParameterGroup(patterns, optax.sgd(rate)) for name, patterns, rate in rates}
    tx, params = by_group(groups, optax.sgd(3.0)), dict.fromkeys("abc", 1.0)
    assert tx.update(params, tx.init(params))[0] == {"a": -1, "b": -2, "c": -3}


GROUPS = {
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 1,
    "optimizer.schedule.name": "constant_schedule",
    "optimizer.warmup_steps": 0,
    "optimizer.groups.stem.patterns": ["Conv_0/.*"],
    "optimizer.groups.stem.name": "sgd",
    "optimizer.groups.stem.kwargs.momentum": 0.9,
    "optimizer.groups.last.patterns": ["Dense_0/.*"],
    "optimizer.groups.last.learning_rate": 0.02,
    "ddp.frozen": ["Dense_0/bias"],
}


def test_the_groups_of_a_config_have_their_rates_and_arguments():
    config, _ = load_config(["fashion_mnist_cnn"], GROUPS)
    params = {name: np.float32(1) for name in ("Conv_0/w", "Conv_1/w", "Dense_0/w", "other/w")}
    params = unflatten_dict(params, sep="/")
    tx, followed = optimizer_of(config, num_steps=10)
    updates, opt_state = tx.update(params, tx.init(params), params)
    rates = {name: -float(x["w"]) for name, x in updates.items()}
    assert rates == pytest.approx({"Conv_0": 1, "Conv_1": 1, "Dense_0": 0.02, "other": 1})
    updates, _ = tx.update(params, opt_state, params)
    close(updates["Conv_0"]["w"], -1.9, rtol=1e-6)  # momentum is of this group alone
    close(updates["Conv_1"]["w"], -1, rtol=1e-6)
    assert followed(0) == 1.0


BAD = [
    ({"groups.a.patterns": []}, "optimizer.groups.a: give 'patterns'"),
    ({"groups.a.paterns": ["x"]}, "groups.a.paterns'.* Did you mean 'patterns'?"),
    ({"groups.rest.patterns": ["x"]}, "groups.rest is all that no group matches"),
    ({"groups.a.patterns": ["x"], "groups.a.name": "adm"}, "groups.a.name: optax has no 'adm'"),
    ({"name": "sgd", "kwargs.weight_decay": 0.1}, "optimizer.kwargs.weight_decay: sgd takes no"),
]


@pytest.mark.parametrize("keys, message", BAD)
def test_groups_that_cannot_be_are_refused_in_one_line(keys, message):
    with pytest.raises(jddp.ConfigError, match=message) as caught:
        optimizer_of(load_config([], {f"optimizer.{key}": x for key, x in keys.items()})[0])
    assert "\n" not in str(caught.value)


def test_patterns_that_match_nothing_are_refused():
    optimizer = by_group({"head": ParameterGroup(["lost/.*"], optax.sgd(0.1))}, optax.sgd(0.1))
    ddp = wrapped(Net(), optimizer=optimizer, accumulate_steps=2)
    with pytest.raises(jddp.ConfigError, match=r"groups.head.patterns: 'lost/.*' matches no"):
        ddp.steps.abstract_state(make_rows())
