"""Names that users type: suggestions, objects and arguments, directions of metrics, synonyms."""

import functools
import inspect
import sys

import pytest
from flax import linen as nn
from flax import nnx

import jddp
from jddp.config.files import load_config
from jddp.config.keys import keys_of
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, warn_deprecated
from jddp.ground.names import (
    accepted_names,
    check_arguments,
    choose_mode,
    did_you_mean,
    direction_of,
    find_attribute,
    name_of_callable,
    resolve_target,
)
from jddp.ground.names.synonyms import OPTIONS

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


def test_a_wrong_target_is_one_line_that_names_its_key():
    for target in ("os.path.join", "os.path:", "os.pth:join", "os.path:joint"):
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


RISING = """
    accuracy val_accuracy top5_accuracy test/accuracy accuracy@5 acc1 balanced_accuracy Accuracy
    macro_f1 F1 auc roc_auc AUROC precision recall@10 recall5 bleu BLEU4 mean_iou r2 R2 val/r2
    episode_reward
"""
FALLING = """
    loss val_loss error top1_error accuracy_error perplexity ppl mse RMSE mean_squared_error
    iou_loss nll wer bits_per_byte
"""
UNKNOWN = """
    score entropy step_time accuracy_std std_accuracy num_errors loss_scale loss_ratio fpr_at_tpr95
    neg_mean_squared_error neg_log_loss minus_loss negative_log_likelihood delta_loss var_loss
    error_reduction accuracy_drop lossless relapse mapping loss_class_3 f2 5 "" @
"""


def test_a_direction_is_known_by_the_last_word_of_a_name():
    for names, direction in ((RISING, "max"), (FALLING, "min"), (UNKNOWN, None)):
        found = {name: direction_of(name) for name in names.split()}
        assert found == dict.fromkeys(found, direction)


def test_the_mode_is_as_given_or_that_of_the_name_or_asked_for():
    assert choose_mode("accuracy", "auto", key="mode") == "max"
    assert choose_mode("accuracy", "min", key="mode") == "min"
    for metric, mode in (("score", "auto"), ("accuracy", "most")):
        with pytest.raises(ConfigError, match="best_mode"):
            choose_mode(metric, mode, key="best_mode")


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


def test_a_deprecated_name_warns_with_the_name_in_its_place_where_it_is_used():
    def old():
        warn_deprecated("jddp.old", since="0.2", instead="jddp.new")

    with pytest.warns(FutureWarning, match=r"jddp\.old .* 0\.2 .* jddp\.new") as caught:
        old()
    assert caught[0].filename == __file__
