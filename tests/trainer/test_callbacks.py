"""What a config lists: callbacks, transforms of rows, weights to start from."""

import jax
import numpy as np
import optax
import pytest
from runs import calling, refused
from safetensors.numpy import save_file

import jddp
from jddp.commands.training import run
from jddp.config.files import load_config
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError
from jddp.ground.typing import TRANSFORM
from jddp.trainer.job.build import build, train
from jddp.trainer.job.build import test_batches as evaluated
from jddp.trainer.job.parts import find_callbacks, make_callbacks
from jddp.workbench.state_dicts import to_state_dict
from jddp.zoo.models import GPT


def config(listed, *keys):
    return load_config([], ["train.eval_every_steps=2", f"callbacks={listed}", *keys])[0]


def log(path):
    return calling(path=path)


def test_words_and_targets_become_callbacks_with_their_arguments():
    listed = "[{name: early_stopping, kwargs: {metric: loss, patience: 5}}, "
    listed += f"{{target: '{__name__}:log', kwargs: {{path: log.txt}}}}]"
    stop, own = make_callbacks(config(listed, "checkpoint.best_metric=null"))
    assert isinstance(stop, jddp.EarlyStopping)
    assert (stop.settings["patience"], own.path) == (5, "log.txt")


def test_callbacks_with_keys_of_their_own_come_first_and_each_run_makes_new_ones():
    made = config("[{name: keep_best, kwargs: {metric: accuracy}}]", "checkpoint.best_metric=loss")
    first, second = make_callbacks(made), make_callbacks(made)
    assert [type(x).__name__ for x in first[-2:]] == ["KeepBest", "KeepBest"]
    assert first[-1] is not second[-1]


WRONG = {
    "[{name: early_stoping}]": "callbacks\\[0\\].name.*early_stopping",
    "[{name: keep_best, kwargs: {metrik: loss}}]": "callbacks\\[0\\].kwargs.*metrik",
    "[{name: keep_best, metric: loss}]": r"callbacks\.0\.metric.*'kwargs'",
    "[early_stopping]": "callbacks must be a section of keys, not 'early_stopping'",
    "[{kwargs: {}}]": "callbacks: give either 'name' or 'target'",
    "[{target: 'nowhere:Log'}]": "callbacks\\[0\\].target.*nowhere",
}


@pytest.mark.parametrize("listed, message", WRONG.items())
def test_mistakes_are_named_by_their_key(listed, message):
    with refused(ConfigError, message):
        find_callbacks(config(listed))


@pytest.mark.usefixtures("started_devices")
def test_a_mistake_in_a_callback_shows_before_the_data_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["callbacks=[{name: nothing}]", "optimizer.name=nothing"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "callbacks[0].name" in said
    assert "optimizer.name" in said


def job_with(*overrides, **data):
    listed = [f"data.{name}={value}" for name, value in data.items()]
    config, _ = load_config(["fashion_mnist_cnn"], ["mesh.num_devices=2", *listed, *overrides])
    return build(config)


def test_listed_transforms_take_the_place_of_those_of_the_data_set():
    batch = next(job_with(transforms="[{name: crop_and_flip}]").train_batches())
    assert batch["draws"].shape[1] == 5
    none = next(job_with(transforms="[]").train_batches())
    assert none.keys() - {"mask"} == {"image", "label", TRANSFORM}  # which normalizes


FLIP, NORMALIZE = {"name": "flip_and_shift"}, {"name": "normalize"}
REFUSED = [
    ({"name": "crop_and_flips"}, r"data.transforms\[0\].name: .*'crop_and_flip'"),
    ({"name": "crop_and_flip", "kwargs": {"smallst": 1}}, r"\[0\].kwargs.*'smallest'"),
    (NORMALIZE, "images of fashion_mnist are float32 .*Leave it out"),
    (FLIP, "change images, and python_stdlib has tokens"),
]


def test_transforms_that_are_unknown_or_of_other_data_are_refused():
    for listed, message in REFUSED:
        name = "python_stdlib" if "tokens" in message else "fashion_mnist"
        data = {"name": name, "global_batch_size": 4, "transforms": [listed]}
        with pytest.raises(ConfigError, match=message):
            build(Config(data=data, model={"name": "gpt"}, train={"num_steps": 1}))


def job_of_images(folder, dtype, *listed):
    for part in ("train", "test"):
        np.savez(folder / part, image=np.ones((4, 28, 28, 1), dtype), label=np.arange(4))
    data = {"name": "npz", "dir": str(folder), "global_batch_size": 4, "transforms": [*listed]}
    return build(Config(data=data, model={"name": "mlp"}, train={"num_steps": 1}))


def test_whole_numbers_are_normalized_by_their_range_and_other_images_are_refused(tmp_path, caplog):
    job = job_of_images(tmp_path, np.uint16, NORMALIZE, FLIP)
    batch, sent = next(job.train_batches()), next(iter(evaluated(job.config, job.data)))
    assert "draws" in batch
    assert "draws" not in sent  # a transform of random numbers is for training alone
    for each in (batch, sent):
        assert each["image"].dtype == np.uint16
        np.testing.assert_allclose(each.pop(TRANSFORM)(each)["image"], 1 / 65535, rtol=1e-6)
    assert not caplog.messages
    for dtype in ("int32", "float32"):
        with pytest.raises(ConfigError, match=f"images of npz are {dtype} .*uint8 or uint16"):
            job_of_images(tmp_path, dtype, FLIP, NORMALIZE)


SIZES = {"vocab_size": 16, "num_layers": 2, "num_heads": 2, "width": 16, "max_length": 8}


def of_weights(run="run", **changes):
    data = {"name": "tokens", "dir": "tokens", "global_batch_size": 8}
    model = {"name": "gpt", "kwargs": SIZES, "init_from": "gpt2.safetensors"}
    return Config(
        train={"num_steps": 8, "log_every_steps": 1},
        run={"dir": run},
        data={**data, "kwargs": {"sequence_length": 8}},
        model={**model, **changes},
        loss={"name": "next_token"},
        optimizer={"name": "adamw", "learning_rate": 0.01},
        mesh={"num_devices": 2},
    )


def test_weights_of_gpt_2_continue_training_or_are_refused_by_the_keys_of_a_config(
    tmp_path, monkeypatch, capsys
):
    """Trained on windows of tokens that are all equal."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()
    for name in ("train", "test"):
        np.save(tmp_path / "tokens" / f"{name}.npy", np.arange(640, dtype=np.uint16) % 8)
    model, window = GPT(**SIZES), np.arange(9)[None] % 8
    variables = jax.jit(model.init)(jax.random.key(7), window[:, :-1])
    variables = jax.tree.map(lambda x: 5 * np.asarray(x), variables)  # unlike any first values
    save_file(tensors := to_state_dict(model, variables, "huggingface"), "gpt2.safetensors")
    losses = [record["loss"] for record in train(of_weights()).history]
    logits = jax.jit(model.apply)(variables, window[:, :-1])
    want = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()
    np.testing.assert_allclose(losses[0], want, rtol=1e-5)
    assert losses[-1] < losses[0] / 2
    assert "by the names of huggingface: 28 of 28 arrays were loaded" in capsys.readouterr().err
    del tensors["transformer.ln_f.bias"]
    save_file(tensors, "gpt2.safetensors")
    message = r"^model\.init_from: .*ln_f.bias \(missing\).*model\.weights_partial=true"
    with refused(ConfigError, message):
        train(of_weights(run="partial"))
    assert train(of_weights(run="partial", weights_partial=True)).step == 8
