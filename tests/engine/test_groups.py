"""Optimizers for groups of parameters."""

import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict
from judge import Net, make_rows, wrapped
from states import close

import jddp
from jddp.config.files import load_config
from jddp.trainer.job.parts import optimizer_of
from jddp.zoo.optimizers import ParameterGroup, by_group


def test_the_first_group_that_matches_has_the_parameter():
    rates = [("one", ["a"], 1.0), ("two", ["a|b"], 2.0)]
    groups = {name: ParameterGroup(patterns, optax.sgd(rate)) for name, patterns, rate in rates}
    tx, params = by_group(groups, optax.sgd(3.0)), dict.fromkeys("abc", 1.0)
    assert tx.update(params, tx.init(params))[0] == {"a": -1, "b": -2, "c": -3}


GROUPS = {
    "optimizer.kwargs.weight_decay": 0.1,
    "optimizer.groups.stem.patterns": ["Conv_0/.*"],
    "optimizer.groups.stem.name": "sgd",
    "optimizer.groups.stem.kwargs.momentum": 0.9,
    "optimizer.groups.last.patterns": ["Dense_0/.*"],
    "optimizer.groups.last.learning_rate": 0.02,
    "ddp.frozen": ["Dense_0/bias"],
}


def test_the_groups_of_a_config_have_their_rates_and_arguments():
    groups = {key: x for key, x in GROUPS.items() if "kwargs.weight" not in key}
    groups |= {"optimizer.schedule.name": "constant_schedule", "optimizer.warmup_steps": 0}
    groups |= {"optimizer.name": "sgd", "optimizer.learning_rate": 1}
    config, _ = load_config(["fashion_mnist_cnn"], groups)
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


@pytest.mark.parametrize("parts", [1, 2])
def test_patterns_that_match_nothing_are_refused(parts):
    optimizer = by_group({"head": ParameterGroup(["lost/.*"], optax.sgd(0.1))}, optax.sgd(0.1))
    ddp = wrapped(Net(), optimizer=optimizer, accumulate_steps=parts)
    with pytest.raises(jddp.ConfigError, match=r"groups.head.patterns: 'lost/.*' matches no"):
        ddp.steps.abstract_state(make_rows())
