"""Callbacks that a config lists are found, checked and made."""

import pytest

import jddp
from jddp.commands.training import run
from jddp.config.files import load_config
from jddp.ground.errors import ConfigError
from jddp.trainer.job.parts import find_callbacks, make_callbacks


def config(listed, *keys):
    return load_config([], ["train.eval_every_steps=2", f"callbacks={listed}", *keys])[0]


class Log(jddp.Callback):
    def __init__(self, path):
        self.path = path


def test_words_and_targets_become_callbacks_with_their_arguments():
    target = f"{__name__}:Log"
    listed = "[{name: early_stopping, kwargs: {metric: loss, patience: 5}}, "
    listed += f"{{target: '{target}', kwargs: {{path: log.txt}}}}]"
    stop, log = make_callbacks(config(listed, "checkpoint.best_metric=null"))
    assert isinstance(stop, jddp.EarlyStopping)
    assert stop.settings["patience"] == 5
    assert (type(log).__name__, log.path) == ("Log", "log.txt")


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
    with pytest.raises(ConfigError, match=message) as caught:
        find_callbacks(config(listed))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("started_devices")
def test_a_mistake_in_a_callback_shows_before_the_data_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["callbacks=[{name: nothing}]", "optimizer.name=nothing"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "callbacks[0].name" in said
    assert "optimizer.name" in said
