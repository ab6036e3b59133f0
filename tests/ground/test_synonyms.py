"""Names of other trainers lead to options that exist."""

import inspect
import re
from pathlib import Path

import pytest

import jddp
from jddp.config.files import load_config
from jddp.config.keys import keys_of
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.ground.names.synonyms import KEYS, OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


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


def test_names_in_the_table_of_the_page_on_trainers_are_suggested_for():
    table = PAGE.read_text().partition("## What the options are called")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:4] for row in table.splitlines() if row.startswith("| ")]
    own = {path[-1] for path in keys_of(Config)}
    no_keys = {"configure_optimizers", "num_nodes", "logger", "report_to"}  # Python's alone
    for *elsewhere, here in rows[1:]:
        keys = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", here)
        for name in re.findall(r"`([a-z][a-z_]{3,})`", " ".join(elsewhere)):
            if keys and name not in own | no_keys:
                assert KEYS[name] in keys, name
