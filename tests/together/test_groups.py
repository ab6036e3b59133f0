"""Optimizers for groups of parameters, and rates that fall from layer to layer."""

import jax
import numpy as np
import optax
import pytest
from judge import Net, make_rows, wrapped
from states import close

import jddp
from jddp.config.files import load_config
from jddp.job.job import build
from jddp.job.optimizers import optimizer_of
from jddp.job.preview import preview
from jddp.zoo.groups import Group, by_group, decay_by_layer, scales_of

OPTIONS = {
    "mean": {},
    "ZeRO": {"shard_optimizer": True},
    "overlap": {"overlap": True, "layout": "flat"},
    "accumulation": {"accumulate_steps": 2},
    "logical replicas": {"logical_replicas": 4, "mesh": 2},
    "frozen": {"frozen": ["first/kernel"]},
}
PATHS = ["embed/w", "block_0/w", "block_2/w", "block_10/w", "head/w"]
LAYERS = ["embed/.*", "block_([0-9]+)/.*"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_group_trains_as_by_its_own_optimizer_on_one_device(options):
    """The judge updates each layer by itself, with the optimizers of optax alone."""
    groups = {"head": Group(["last/.*"], optax.sgd(0.1, momentum=0.9))}
    optimizer = by_group(groups, optax.adam(0.01))
    optimizer = decay_by_layer(optimizer, ["first/kernel"] * ("frozen" not in options), 0.5)
    ddp = wrapped(Net(), optimizer=optimizer, **options)
    state = ddp.init(0, make_rows())
    params = jax.device_get(ddp.model(state)["params"])
    still = params["first"].pop("kernel") if "frozen" in options else None
    alone = {"first": optax.adam(0.01), "last": groups["head"].optimizer}
    opt_states = {name: alone[name].init(params[name]) for name in alone}
    for seed in range(3):
        batch = make_rows(seed=seed)

        def loss(params, batch=batch):
            first = params["first"] | ({} if still is None else {"kernel": still})
            outputs = Net().apply({"params": params | {"first": first}}, batch["x"])
            return ((outputs - batch["y"]) ** 2).mean()

        grads = jax.grad(loss)(params)
        for name, tx in alone.items():
            updates, opt_states[name] = tx.update(grads[name], opt_states[name], params[name])
            if name == "first" and still is None:
                updates["kernel"] = 0.5 * updates["kernel"]
            params[name] = optax.apply_updates(params[name], updates)
        state, _ = ddp.step(state, batch)
    trained = ddp.model(state)["params"]
    if still is not None:
        params["first"]["kernel"] = still
    # Adam divides by the root of a gradient's square, which keeps no rounding of the mean small.
    close(trained, params, rtol=1e-4)


def test_layers_are_counted_downwards_from_what_no_pattern_matches():
    scales = scales_of(LAYERS, 0.5, PATHS)
    # The head is the highest; blocks follow their numbers, not the order of their names.
    assert [scales[path] for path in PATHS] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    assert scales_of([], 0.5, PATHS) == dict.fromkeys(PATHS, 1)


@pytest.mark.parametrize(
    "layers, message",
    [
        (
            ["embd/.*"],
            "layer_decay.layers: 'embd/.*' matches no whole path .*nearest are 'embed/w'",
        ),
        (["(embed)/.*"], "finds 'embed' in embed/w, and no number"),
        (["block_(/.*"], "no regular expression"),
    ],
)
def test_layers_that_match_nothing_or_no_number_are_refused(layers, message):
    with pytest.raises(jddp.ConfigError, match=message):
        scales_of(layers, 0.5, PATHS)


def test_a_pattern_of_a_group_that_matches_nothing_is_refused_before_a_step():
    optimizer = by_group({"head": Group(["lost/.*"], optax.sgd(0.1))}, optax.sgd(0.1))
    for accumulate_steps in (1, 2):
        ddp = wrapped(Net(), optimizer=optimizer, accumulate_steps=accumulate_steps)
        with pytest.raises(jddp.ConfigError, match=r"groups.head.patterns: 'lost/.*' matches no"):
            ddp.abstract_state(make_rows())


def test_the_first_group_that_matches_has_the_parameter():
    rates = [("one", ["a"], 1.0), ("two", ["a|b"], 2.0)]
    groups = {name: Group(patterns, optax.sgd(rate)) for name, patterns, rate in rates}
    tx, params = by_group(groups, optax.sgd(3.0)), dict.fromkeys("abc", 1.0)
    assert tx.update(params, tx.init(params))[0] == {"a": -1, "b": -2, "c": -3}


GROUPS = {
    "optimizer.kwargs.weight_decay": 0.1,
    "optimizer.groups.stem.patterns": ["Conv_0/.*"],
    "optimizer.groups.stem.name": "sgd",
    "optimizer.groups.stem.kwargs.momentum": 0.9,
    "optimizer.groups.last.patterns": ["Dense_0/.*"],
    "optimizer.groups.last.learning_rate": 0.02,
    "optimizer.layer_decay.layers": ["Conv_([0-9]+)/.*"],
    "optimizer.layer_decay.factor": 0.5,
    "ddp.frozen": ["Dense_0/bias"],
}


def test_a_dry_run_lists_how_each_parameter_is_trained():
    config, _ = load_config(["fashion_mnist_cnn"], {**GROUPS, "optimizer.learning_rate": 0.01})
    table = preview(build(config)).partition(" peak rate")[2].splitlines()[1:]
    rows = {row.split()[-1]: row.split()[:-1] for row in table[: table.index("")]}
    assert rows["Conv_0/kernel"] == ["0.00125", "0", "sgd", "stem"]
    assert rows["Conv_1/kernel"] == ["0.0025", "0.1", "adamw", "rest"]
    assert rows["BatchNorm_1/bias"] == ["0.01", "0", "adamw", "rest"]
    assert rows["Dense_0/kernel"] == ["0.02", "0.1", "adamw", "last"]
    assert rows["Dense_0/bias"] == ["frozen"]
    job = build(config)
    names = jax.tree.leaves(job.ddp.abstract_state(job.batch_spec).params)
    assert len(rows) == len(names) + 1


def test_the_groups_of_a_config_have_their_rates_and_arguments():
    config, _ = load_config(["fashion_mnist_cnn"], {**GROUPS, "optimizer.name": "sgd"})
    with pytest.raises(jddp.ConfigError, match="optimizer.kwargs.weight_decay: sgd takes no"):
        optimizer_of(config)
    drop = {key: x for key, x in GROUPS.items() if "kwargs.weight" not in key}
    schedule = {"optimizer.schedule.name": "constant_schedule", "optimizer.warmup_steps": 0}
    drop["optimizer.name"] = "sgd"
    config, _ = load_config(
        ["fashion_mnist_cnn"], {**drop, **schedule, "optimizer.learning_rate": 1}
    )
    leaves = {"a": np.float32(1)}
    params = {name: leaves for name in ("Conv_0", "Conv_1", "Dense_0", "other")}
    tx, followed = optimizer_of(config, num_steps=10)
    updates, opt_state = tx.update(params, tx.init(params), params)
    want = {
        "Conv_0": {"a": -0.25},
        "Conv_1": {"a": -0.5},
        "Dense_0": {"a": -0.02},
        "other": {"a": -1.0},
    }
    close(updates, want, rtol=1e-6)
    updates, _ = tx.update(params, opt_state, params)
    close(updates["Conv_0"]["a"], -0.25 * 1.9, rtol=1e-6)  # momentum is of this group alone
    close(updates["Conv_1"]["a"], -0.5, rtol=1e-6)
    assert followed(0) == 1.0


BAD = [
    ({"groups.a.patterns": []}, "optimizer.groups.a: give 'patterns'"),
    ({"groups.a.patterns": ["x"], "groups.a.learning_rate": -1}, "groups.a.learning_rate must be"),
    ({"groups.a.paterns": ["x"]}, "groups.a.paterns'.* Did you mean 'patterns'?"),
    ({"groups.rest.patterns": ["x"]}, "groups.rest is all that no group matches"),
    ({"groups.a.patterns": ["x"], "groups.a.name": "adm"}, "groups.a.name: optax has no 'adm'"),
    ({"groups": ["x"]}, "optimizer.groups must be .* not"),
    ({"layer_decay.factor": 0.5}, "layer_decay: give both 'factor', below 1, and 'layers'"),
    ({"layer_decay.layers": ["x"]}, "layer_decay: give both"),
]


@pytest.mark.parametrize("keys, message", BAD)
def test_groups_that_cannot_be_are_refused_in_one_line(keys, message):
    with pytest.raises(jddp.ConfigError, match=message) as caught:
        config, _ = load_config([], {f"optimizer.{key}": x for key, x in keys.items()})
        optimizer_of(config)
    assert "\n" not in str(caught.value)
