import sys
from pathlib import Path

import pytest

import jddp.config
from jddp.config import Config, ConfigMistakes, dump_values, load_config, with_overrides
from jddp.errors import ConfigError


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


def test_later_sources_win_and_the_run_is_named_after_its_files(file):
    files = [file(SHORT + "seed: 1", "a.yaml"), file("seed: 2", "b.yaml")]
    config, name = load_config(files, ["seed=3", "data.global_batch_size=64"])
    assert (config.seed, config.train.num_steps, config.data.global_batch_size) == (3, 10, 64)
    assert (name, config.run.dir) == ("a+b", "runs/a+b")


def test_a_number_like_1e_3_is_a_number_also_among_free_arguments(file):
    files = [file(SHORT + "optimizer: {kwargs: {b1: 1e-3}}")]
    config, _ = load_config(files, ["optimizer.kwargs.eps=1e-8", "optimizer.learning_rate=1e-2"])
    assert config.optimizer.kwargs == {"b1": 1e-3, "eps": 1e-8}
    assert config.optimizer.learning_rate == 1e-2


def test_a_dumped_config_reads_back_to_the_same_values(file):
    overrides = ["model.kwargs.name='1e-3'", "optimizer.kwargs.eps=1e-30"]
    overrides += ["ddp.bucket_mb=[0.1, 25]", "ddp.wire_dtype=bfloat16"]
    config, _ = load_config([file(SHORT)], overrides)
    assert load_config([file(dump_values(config.model_dump()))])[0] == config


def test_a_section_whose_keys_are_commented_out_has_its_defaults(file):
    config, _ = load_config([file(SHORT + "optimizer:\n  schedule:\nmodel:\n")])
    assert config == load_config([file(SHORT)])[0]


def test_a_choice_on_the_command_line_replaces_the_one_of_the_file(file):
    files = [file("train: {num_epochs: 2}\nmodel: {name: cnn, kwargs: {width: 8}}")]
    config, _ = load_config(files, ["train.num_steps=5", "model.target=mine:Net"])
    assert (config.train.num_steps, config.train.num_epochs) == (5, None)
    assert (config.model.name, config.model.target, config.model.kwargs) == (None, "mine:Net", {})


def test_the_same_choice_keeps_the_arguments_of_the_file(file):
    files = [file(SHORT + "model: {name: mlp, kwargs: {width: 8}}")]
    config, _ = load_config(files, ["model.name=mlp", "model.kwargs.depth=2"])
    assert config.model.kwargs == {"width": 8, "depth": 2}


def test_overrides_from_python_are_dotted_keys_or_sections(file):
    config, _ = load_config([file(SHORT)], {"optimizer.name": "sgd", "train": {"num_epochs": 1.5}})
    changed = with_overrides(config, {"optimizer": {"kwargs": {"momentum": 0.9}}})
    assert changed.optimizer.name == "sgd"
    assert changed.optimizer.kwargs == {"momentum": 0.9}
    assert changed.train.num_epochs == 1.5
    assert config.optimizer.kwargs == {}


def test_every_mistake_is_reported_at_once_with_its_source_and_key(file):
    files = [file("train: {num_steps: 10}\noptimizer: {learning_rat: 0.1}\nmesh: {num_devices: 0}")]
    given = ["optimizer.learning_rate=-1", "sede=3", "warmup_steps=3", "ddp.layout=leav", "model=3"]
    assert sorted(mistakes_in(files, given)) == [
        f"{files[0]}: mesh.num_devices must be greater than or equal to 1 or 'auto', not 0.",
        f"{files[0]}: unknown key 'optimizer.learning_rat'. Did you mean 'learning_rate'?",
        "command line: ddp.layout must be 'auto', 'leaf' or 'flat', not 'leav'.",
        "command line: model must be a section of keys, not 3.",
        "command line: optimizer.learning_rate must be greater than 0, not -1.",
        "command line: unknown key 'sede'. Did you mean 'seed'?",
        "command line: unknown key 'warmup_steps'. Did you mean 'optimizer.warmup_steps'?",
    ]


@pytest.mark.parametrize(
    "override, rule",
    [
        ("train.num_steps=1.5", "valid integer, not 1.5"),
        ("train.num_steps='5'", "valid integer, not '5'"),
        ("train.num_steps=true", "valid integer, not True"),
        ("data.shuffle=1", "valid boolean, not 1"),
        ("optimizer.learning_rate=.nan", "finite number, not nan"),
        ("optimizer.learning_rate=null", "valid number, not None"),
        ("ddp.ema_decay=1", "less than 1, not 1"),
        ("ddp.bucket_mb=0", "greater than 0 or a valid list, not 0"),
        ("ddp.first_bucket_mb=0", "greater than 0, not 0"),
        ("checkpoint.resume=yes", "'auto', 'never' or 'must'"),
        ("model.kwargs=[1]", "valid dictionary, not [1]"),
        ("data.name=null", "data: give either 'name' or 'target'."),
        ("train.num_epochs=3", "train: give either 'num_steps' or 'num_epochs'."),
        ("train.eval_params=ema", "needs ddp.ema_decay"),
    ],
)
def test_wrong_types_and_impossible_ranges_name_the_rule(file, override, rule):
    (line,) = mistakes_in([file("seed: 1")], ["train.num_steps=10", override][::1])[:1]
    assert rule in line


@pytest.mark.parametrize("override", ["foo", "=3", "a..b=3", "seed=[", "seed=${nothing}"])
def test_an_override_that_cannot_be_read_is_one_line(file, override):
    (line,) = mistakes_in([file(SHORT)], [override])
    assert override.strip("${}") in line or "nothing" in line


@pytest.mark.parametrize(
    "text", ["- 3", "train: {a: 1", "train: {num_steps: 1, num_steps: 2}", "3"]
)
def test_a_file_that_cannot_be_read_is_one_line_that_names_it(file, text):
    path = file(text)
    (line,) = mistakes_in([path])
    assert line.startswith(f"{path}: cannot be read: ")


def test_a_missing_file_or_preset_suggests_a_preset(monkeypatch, tmp_path):
    (tmp_path / "fashion_mnist_cnn.yaml").write_text(SHORT)
    monkeypatch.setattr("jddp.config.files.PRESETS", [tmp_path])
    (line,) = mistakes_in(["configs/fashion_mnist_cn.yaml"])
    assert line == (
        "--config configs/fashion_mnist_cn.yaml: no such file or preset. "
        "Did you mean 'fashion_mnist_cnn'?"
    )
    assert load_config()[1] == "fashion_mnist_cnn"


def test_a_config_made_in_python_obeys_the_same_rules():
    with pytest.raises(ConfigMistakes, match=r"optimizer\.learning_rate must be greater than 0"):
        Config(train={"num_steps": 1}, optimizer={"learning_rate": -1})
    with pytest.raises(ConfigError, match="train: give either 'num_steps' or 'num_epochs'"):
        Config()


def test_every_key_says_what_it_means():
    def fields(schema):
        for field in schema.model_fields.values():
            is_section = isinstance(field.annotation, type) and hasattr(
                field.annotation, "model_fields"
            )
            yield from fields(field.annotation) if is_section else [field]

    assert all(field.description for field in fields(Config))


def test_every_shipped_config_is_valid_and_says_its_command():
    folder = Path(jddp.config.__file__).parents[2] / "configs"
    for path in folder.glob("*.yaml"):
        load_config([str(path)])
        assert f"--config configs/{path.name}" in path.read_text()


def test_reading_a_config_does_not_start_jax():
    import subprocess

    code = "import sys, jddp.config; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
