"""Configs: read, merged, checked by rules that are named, and written."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jddp
import jddp.config
from jddp.config.files import dump_values, flatten, load_config, with_overrides
from jddp.config.keys import ConfigMistakes, keys_of
from jddp.config.options import BatchNormConfig, PrecisionConfig, StrategyConfig
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "small.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def mistakes_in(files=(), overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


SHORT = "train: {num_steps: 10}\n"


def test_later_sources_win_the_run_is_named_after_its_files_and_1e_3_is_a_number(file):
    files = [file(SHORT + "optimizer: {kwargs: {b1: 1e-3}}")]
    config, _ = load_config(files, ["optimizer.kwargs.eps=1e-8", "optimizer.learning_rate=1e-2"])
    assert config.optimizer.kwargs == {"b1": 1e-3, "eps": 1e-8}
    assert config.optimizer.learning_rate == 1e-2
    files = [file(SHORT + "seed: 1", "a.yaml"), file("seed: 2", "b.yaml")]
    config, name = load_config(files, ["seed=3", "data.global_batch_size=64"])
    assert (config.seed, config.train.num_steps, config.data.global_batch_size) == (3, 10, 64)
    assert (name, config.run.dir) == ("a+b", "runs/a+b")


def test_a_dumped_config_reads_back_to_the_same_values(file):
    overrides = ["model.kwargs.name='1e-3'", "optimizer.kwargs.eps=1e-30"]
    overrides += ["ddp.reduction.bucket_mb=[0.1, 25]", "ddp.reduction.wire_dtype=bfloat16"]
    config, _ = load_config([file(SHORT)], overrides)
    assert load_config([file(dump_values(config.model_dump()))])[0] == config
    config, _ = load_config([file(SHORT + "optimizer:\n  schedule:\nmodel:\n")])
    assert config == load_config([file(SHORT)])[0]  # Keys that are commented out are the defaults.


def test_another_choice_on_the_command_line_replaces_that_of_the_file_and_the_same_keeps_it(file):
    files = [file("train: {num_epochs: 2}\nmodel: {name: cnn, kwargs: {width: 8}}")]
    config, _ = load_config(files, ["train.num_steps=5", "model.target=mine:Net"])
    assert (config.train.num_steps, config.train.num_epochs) == (5, None)
    assert (config.model.name, config.model.target, config.model.kwargs) == (None, "mine:Net", {})
    config, _ = load_config(files, ["model.name=cnn", "model.kwargs.depth=2"])
    assert config.model.kwargs == {"width": 8, "depth": 2}


RULES = {
    "train.num_steps=1.5": "valid integer, not 1.5",
    "train.num_steps=true": "valid integer, not True",
    "data.shuffle=1": "valid boolean, not 1",
    "optimizer.learning_rate=.nan": "finite number, not nan",
    "ddp.ema_decay=1": "less than 1, not 1",
    "ddp.reduction.bucket_mb=0": "greater than 0 or a valid list, not 0",
    "ddp.reduction.layout=leav": "must be 'auto', 'leaf' or 'flat', not 'leav'",
    "optimizer.lr=0.1": "unknown key 'optimizer.lr'. Did you mean 'learning_rate'?",
    "ddp.first_bucket_mb=1": "'ddp.first_bucket_mb'. Did you mean 'ddp.reduction.bucket_mb'?",
    "checkpoint.resume=always": "'auto', 'never', 'must' or 'changed'",
    "model.kwargs=[1]": "valid dictionary, not [1]",
    "data.name=null": "data: give either 'name' or 'target'.",
    "train.num_epochs=3": "train: give either 'num_steps' or 'num_epochs'.",
    "train={eval_every_steps: 2, eval_every_epochs: 1}": "train: 'eval_every_steps'",
    "checkpoint={every_steps: 2, every_epochs: 1}": "checkpoint: 'every_steps'",
    "checkpoint.best_metric=score": "keep_best",
    "train.profile_steps=[0,3]": "train.profile_steps must be",
    "ddp.strategy=fsdpp": "ddp.strategy.name must be 'ddp', 'zero1', ",
    "ddp.strategy=local_steps": "local_steps needs 'every'",
    "ddp.strategy.number=8": "'number' belongs to logical_replicas, and the name is ddp",
    "ddp.strategy.group_size=4": "'group_size' belongs to fsdp, and the name is ddp",
    "ddp.strategy={name: fsdp, group_size: four}": "ddp.strategy.group_size must be",
    "ddp.strategy={name: fsdp, group_size: 1}": "ddp.strategy.group_size must be",
    "ddp.batch_norm={name: local, group_size: 2}": "belong to sync, not to local",
    "ddp.precision=float8": "ddp.precision.compute_dtype must be 'bfloat16' or 'float16'",
    "ddp.reduction.wire_dtyp=float16": "'ddp.reduction.wire_dtyp'. Did you mean 'wire_dtype'?",
}


def test_every_mistake_is_reported_at_once_with_its_source_and_key(file):
    files = [file("train: {num_steps: 10}\noptimizer: {learning_rat: 0.1}\nmesh: {num_devices: 0}")]
    given = ["optimizer.learning_rate=-1", "sede=3", "warmup_steps=3", "model=3"]
    assert sorted(mistakes_in(files, given)) == [
        f"{files[0]}: mesh.num_devices must be greater than or equal to 1 or 'auto', not 0.",
        f"{files[0]}: unknown key 'optimizer.learning_rat'. Did you mean 'learning_rate'?",
        "command line: model must be a section of keys, not 3.",
        "command line: optimizer.learning_rate must be greater than 0, not -1.",
        "command line: unknown key 'sede'. Did you mean 'seed'?",
        "command line: unknown key 'warmup_steps'. Did you mean 'optimizer.warmup_steps'?",
    ]


def test_wrong_types_and_impossible_ranges_name_the_rule_and_the_unreadable_is_one_line(file):
    for override, rule in RULES.items():
        line, *_ = mistakes_in([file("seed: 1")], ["train.num_steps=10", override])
        assert rule in line
    for override in ("foo", "=3", "a..b=3", "seed=[", "seed=${nothing}"):
        (line,) = mistakes_in([file(SHORT)], [override])
        assert override.strip("${}") in line or "nothing" in line


def test_a_missing_file_or_preset_suggests_a_preset(monkeypatch, tmp_path):
    (tmp_path / "fashion_mnist_cnn.yaml").write_text(SHORT)
    monkeypatch.setattr("jddp.config.files.PRESETS", [tmp_path])
    (line,) = mistakes_in(["configs/fashion_mnist_cn.yaml"])
    start = "--config configs/fashion_mnist_cn.yaml: no such file or preset. "
    assert line == start + "Did you mean 'fashion_mnist_cnn'?"
    assert load_config()[1] == "fashion_mnist_cnn"


def test_a_job_of_targets_without_a_file_starts_from_the_schema_and_has_the_targets_name(file):
    targets = ["model.target=my_models:Net", "data.target=my_data:load", "loss.target=my_losses:l2"]
    config, name = load_config((), targets)
    assert (name, config.run.dir) == ("Net", "runs/Net")
    untouched = Config(train={"num_epochs": 1}, run={"dir": "runs/Net"})
    for section in ("train", "optimizer", "ddp", "checkpoint", "mesh", "watchdog"):
        assert getattr(config, section) == getattr(untouched, section)
    for section in ("model", "data", "loss"):  # one of them alone
        config, name = load_config((), [f"{section}.target=mine:Other", "train.num_steps=7"])
        assert (name, config.train.num_steps, config.train.num_epochs) == ("Other", 7, None)
        assert config.optimizer.warmup_steps == 0
    config, name = load_config([file(SHORT + "seed: 4")], ["model.target=mine:Net"])
    assert (name, config.seed, config.train.num_steps) == ("small", 4, 10)
    (line,) = mistakes_in((), ["model.target=5"])
    assert line.startswith("command line: model.target must be a valid string")


def test_what_comes_from_python_has_dotted_keys_or_sections_and_obeys_the_same_rules(file):
    config, _ = load_config([file(SHORT)], {"optimizer.name": "sgd", "train": {"num_epochs": 1.5}})
    changed = with_overrides(config, {"optimizer": {"kwargs": {"momentum": 0.9}}})
    assert changed.optimizer.name == "sgd"
    assert changed.optimizer.kwargs == {"momentum": 0.9}
    assert changed.train.num_epochs == 1.5
    assert config.optimizer.kwargs == {}
    with pytest.raises(ConfigMistakes, match=r"optimizer\.learning_rate must be greater than 0"):
        Config(train={"num_steps": 1}, optimizer={"learning_rate": -1})
    with pytest.raises(ConfigMistakes, match="unknown key 'optimizer=adam'"):
        load_config([file(SHORT)], {"optimizer=adam": 1})
    with pytest.raises(ConfigError, match="train: give either 'num_steps' or 'num_epochs'"):
        Config()


def test_every_key_says_what_it_means_and_every_shipped_config_its_command():
    assert all(field.description for field in keys_of(Config).values())
    folder = Path(jddp.config.__file__).parents[2] / "configs"
    for path in folder.glob("*.yaml"):
        load_config([str(path)])
        assert f"--config configs/{path.name}" in path.read_text()


PATHS = ("data.dir", "data.sample_weights", "model.init_from")


def with_key(file, key, value):
    """Sources of a config that set a key: a file, and the command line."""
    section, _, name = key.partition(".")
    in_file = file(f"{SHORT}{section}: {{{name}: {value}}}")
    return ([in_file], []), ([file(SHORT, "plain.yaml")], [f"{key}={value}"])


def test_a_tilde_in_a_path_is_the_home_directory_and_refused_without_one(file, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(file(SHORT)).parent))
    home = Path.home()
    assert load_config(["~/small.yaml"])[1] == "small"
    for key in ("run.dir", *PATHS):
        for given in with_key(file, key, "~/x"):
            assert flatten(load_config(*given)[0].model_dump())[key] == f"{home}/x"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user id without a passwd entry
    (line,) = mistakes_in([file(SHORT)], ["run.dir=~/x"])
    assert line.startswith("command line: run.dir: '~/x' names a home directory")
    assert load_config([file(SHORT)], ["run.dir=./~x"])[0].run.dir == "./~x"


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "file:///tmp/run", "hf://x"])
def test_a_url_in_the_place_of_a_folder_is_refused_in_one_line(file, url):
    for key in PATHS:
        for given in with_key(file, key, url):
            (line,) = mistakes_in(*given)
            assert f"{key}: '{url}' is a URL, and only a run directory may be one" in line
            assert line.endswith("give its folder here, such as /mnt/storage/run.")
    assert load_config([file(SHORT)], [f"run.dir={url}"])[0].run.dir == url
    for path in ("runs/a", "/tmp/s3:/x", "12:/x", "a:b", "./s3://x", "c:/x"):
        given = [f"{key}='{path}'" for key in ("run.dir", "data.dir")]
        assert load_config([file(SHORT)], given)[0].data.dir == path


def test_values_nested_300_deep_or_holding_themselves_are_refused_in_one_line(file):
    deep, nested, endless = "[" * 300 + "]" * 300, {}, []
    endless.append(endless)
    for _ in range(300):
        nested = {"x": nested}
    for given in (
        [f"model.kwargs.x={deep}"],
        *({"model.kwargs": {"x": x}} for x in (nested, endless)),
    ):
        (line,) = mistakes_in([file(SHORT)], given)
        assert line.startswith("command line: ")
    (line,) = mistakes_in([path := file(f"{SHORT}model: {{kwargs: {{x: {deep}}}}}")])
    assert line.startswith(f"{path}: cannot be read: ")


@pytest.mark.parametrize("float16", ["float16", jnp.float16, np.dtype("float16")])
def test_a_word_for_float16_has_a_dynamic_loss_scale_and_an_object_has_what_it_says(float16):
    chosen = PrecisionConfig.chosen(float16, "precision")
    assert (chosen.compute_dtype, chosen.loss_scale) == ("float16", "dynamic")
    assert jddp.Precision(compute_dtype=float16).loss_scale is None
    assert PrecisionConfig.chosen("bfloat16", "precision").loss_scale is None


def test_a_word_in_a_config_leaves_the_other_values_of_its_section():
    given = ["ddp.reduction.bucket_mb=5", "ddp.reduction=bfloat16", "ddp.precision=float16"]
    ddp = load_config([], given)[0].ddp
    assert (ddp.reduction.wire_dtype, ddp.reduction.bucket_mb) == ("bfloat16", 5)
    assert ddp.precision.loss_scale == "dynamic"


def test_another_choice_in_a_later_source_drops_what_belonged_to_the_first(file):
    path = file(
        "ddp:\n  strategy: {name: local_steps, every: 16}\n  batch_norm: {group_size: 2}\n"
        "  precision: float16\n"
    )
    words = ["ddp.strategy=zero1", "ddp.batch_norm=local", "ddp.precision=bfloat16"]
    ddp = load_config([path], ["train.num_steps=1", *words])[0].ddp
    assert ddp.strategy == StrategyConfig(name="zero1")
    assert ddp.batch_norm == BatchNormConfig(name="local")
    assert ddp.precision == PrecisionConfig(compute_dtype="bfloat16")


WRONG = {
    "precision='fp8': compute_d": lambda: PrecisionConfig.chosen("fp8", "precision"),
    "jddp.Reduction: bucket_mb must be greater": lambda: jddp.Reduction(bucket_mb=0),
    "jddp.Reduction: unknown key 'overlaps'. Did": lambda: jddp.Reduction(overlaps=True),
    "strategy='fsdpp' is": lambda: jddp.DataParallel(*[None] * 3, strategy="fsdpp"),
}


@pytest.mark.parametrize("message, make", WRONG.items(), ids=WRONG)
def test_a_mistake_in_an_object_of_python_is_one_line(message, make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
