"""Names of other trainers lead to options that exist."""

import inspect

import pytest

import jddp
from jddp.config.files import load_config
from jddp.config.keys import keys_of
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.ground.names.synonyms import OPTIONS


def test_every_option_that_is_suggested_exists():
    paths = [path[:length] for path in keys_of(Config) for length in range(1, len(path) + 1)]
    known = {".".join(path) for path in paths}
    takes = {"": jddp.DataParallel, "fit": jddp.fit}
    for option in OPTIONS:
        assert option.key in known | {""}
        owner, _, name = option.argument.rpartition(".")
        if owner == "jddp":
            assert hasattr(jddp, name)
        elif name:
            assert name in inspect.signature(takes[owner]).parameters
    names = [name for option in OPTIONS for name in option.names]
    assert len(names) == len(set(names))


def test_a_key_of_another_trainer_is_given_the_key_that_is_meant():
    for name, meant in (
        ("train.precision", "ddp.precision"),
        ("optimizer.gradient_clip_val", "ddp.max_grad_norm"),
        ("train.output_dir", "run.dir"),
        ("optimizer.lr", "learning_rate"),
        ("train.max_step", "num_steps"),
        ("bf16", "ddp.precision"),
    ):
        with pytest.raises(ConfigError, match=f"'{name}'. Did you mean '{meant}'"):
            load_config([], [f"{name}=1"])
