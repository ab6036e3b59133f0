import functools
import sys

import pytest
from flax import linen as nn
from flax import nnx

from jddp.ground.errors import ConfigError
from jddp.ground.names import (
    accepted_names,
    check_arguments,
    did_you_mean,
    find_attribute,
    name_of_callable,
    resolve_target,
)

MEANT = {"adamv": "adam", "AdamW": "adamw", "cosine": "cosine_decay_schedule"}
MEANT |= {"zzz": None, "": None}
# And abbreviations.
MEANT |= {"lr": "learning_rate", "LR": "learning_rate", "lrate": "learning_rate"}
MEANT |= {"wd": "weight_decay", "bs": "global_batch_size", "ckpt": "checkpoint"}
KNOWN = ["adam", "adamw", "cosine_decay_schedule", "warmup_steps", "learning_rate"]
KNOWN += ["global_batch_size", "weight_decay", "checkpoint"]


def test_the_nearest_known_name_is_suggested():
    for typed, meant in MEANT.items():
        assert did_you_mean(typed, KNOWN) == (f" Did you mean {meant!r}?" if meant else "")
    for typed in ("tr", "lrx", "_"):  # Letters in another order, or from the middle.
        assert did_you_mean(typed, ["learning", "rate"]) == ""
    known = {"learning_rate": "optimizer.learning_rate"}
    assert did_you_mean("learning_rat", known) == " Did you mean 'optimizer.learning_rate'?"


def test_a_target_is_found_in_the_current_directory_and_inside_classes(tmp_path, monkeypatch):
    (tmp_path / "just_here.py").write_text("class Outer:\n    class Inner:\n        pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    monkeypatch.delitem(sys.modules, "just_here", raising=False)
    assert resolve_target("just_here:Outer.Inner", key="k").__name__ == "Inner"


@pytest.mark.parametrize("target", ["os.path.join", "os.path:", "os.pth:join", "os.path:joint"])
def test_a_wrong_target_is_one_line_that_names_its_key(target):
    with pytest.raises(ConfigError, match="k: ") as caught:
        resolve_target(target, key="k")
    assert len(str(caught.value).splitlines()) == 1


def test_a_name_is_looked_up_along_its_dots():
    assert find_attribute(sys, "flags.debug", called="sys", key="k") == sys.flags.debug
    with pytest.raises(ConfigError, match="'debug'"):
        find_attribute(sys, "flags.debg", called="sys", key="k")


class LinenNet(nn.Module):
    width: int = 1


class NnxNet(nnx.Module):
    def __init__(self, width, *, rngs):
        self.width = width


def function(a, b=1, *rest, c, **more):
    return a, b, rest, c, more


def test_arguments_are_known_and_held_against_the_signature_without_a_call():
    assert accepted_names(function, key="k") == {"a", "b", "c"}
    assert accepted_names(NnxNet, key="k") == {"width", "rngs"}
    assert "width" in accepted_names(LinenNet, key="k")
    assert "b" in accepted_names(functools.partial(function, a=1), key="k")
    assert name_of_callable(functools.partial(function, a=1)) == "function"
    with pytest.raises(ConfigError, match="k names 3, which cannot be called"):
        accepted_names(3, key="k")
    check_arguments(NnxNet, {"width": 1}, key="k", filled=["rngs"])
    check_arguments(function, {"a": 1, "c": 2, "anything": 3}, key="k")
    with pytest.raises(ConfigError, match=r"k\.widht: NnxNet takes no argument 'widht'.*'width'"):
        check_arguments(NnxNet, {"widht": 1}, key="k", filled=["rngs"])
    with pytest.raises(ConfigError, match=r"k\.c is missing: function needs the argument 'c'"):
        check_arguments(function, {"a": 1}, key="k")
