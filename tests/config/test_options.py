"""Options that take a word or an object, which are sections of a config as well."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jddp
from jddp.config.files import load_config
from jddp.config.options import BatchNormConfig, PrecisionConfig, StrategyConfig
from jddp.ground.errors import ConfigError


@pytest.mark.parametrize("float16", ["float16", jnp.float16, np.dtype("float16")])
def test_a_word_for_float16_has_a_dynamic_loss_scale_and_an_object_has_what_it_says(float16):
    chosen = PrecisionConfig.chosen(float16, "precision")
    assert (chosen.compute_dtype, chosen.loss_scale) == ("float16", "dynamic")
    assert jddp.Precision(compute_dtype=float16).loss_scale is None
    assert PrecisionConfig.chosen("bfloat16", "precision").loss_scale is None


def ddp_of(*overrides):
    return load_config([], overrides)[0].ddp


def test_a_word_in_a_config_leaves_the_other_values_of_its_section():
    ddp = ddp_of("ddp.reduction.bucket_mb=5", "ddp.reduction=bfloat16", "ddp.precision=float16")
    assert (ddp.reduction.wire_dtype, ddp.reduction.bucket_mb) == ("bfloat16", 5)
    assert ddp.precision.loss_scale == "dynamic"


def test_another_choice_in_a_later_source_drops_what_belonged_to_the_first(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "ddp:\n  strategy: {name: local_steps, every: 16}\n  batch_norm: {group_size: 2}\n"
        "  precision: float16\n"
    )
    words = ["ddp.strategy=zero1", "ddp.batch_norm=local", "ddp.precision=bfloat16"]
    ddp = load_config([str(path)], ["train.num_steps=1", *words])[0].ddp
    assert ddp.strategy == StrategyConfig(name="zero1")
    assert ddp.batch_norm == BatchNormConfig(name="local")
    assert ddp.precision == PrecisionConfig(compute_dtype="bfloat16")


IN_A_CONFIG = {
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


WRONG = [(functools.partial(ddp_of, key), message) for key, message in IN_A_CONFIG.items()]
WRONG += [
    (lambda: PrecisionConfig.chosen("fp8", "precision"), "precision='fp8': compute_d"),
    (lambda: jddp.Reduction(bucket_mb=0), "jddp.Reduction: bucket_mb must be greater"),
    (lambda: jddp.Reduction(overlaps=True), "jddp.Reduction: unknown key 'overlaps'. Did"),
    (lambda: jddp.DataParallel(*[None] * 3, strategy="fsdpp"), "strategy='fsdpp' is"),
]


@pytest.mark.parametrize("make, message", WRONG)
def test_a_mistake_in_a_config_or_in_python_is_one_line(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
