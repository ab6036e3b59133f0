"""Optuna searches the keys of a config: it suggests values, and prunes trials."""

import json
import math
from pathlib import Path

import optuna
import pytest
from runs import of_job, records, run_module
from workers.search import config, search, suggest

import jddp
from jddp.distributed.identity import VARIABLES
from jddp.ground.errors import ConfigError, UsageError
from jddp.workbench.objective import objective

pytestmark = pytest.mark.usefixtures("started_devices")
optuna.logging.set_verbosity(optuna.logging.ERROR)


def of_loss(folder, **options):
    return objective(config(folder), suggest, metric="loss", **options)


def test_a_trial_trains_with_suggested_values_and_has_the_value_of_its_best_evaluation(tmp_path):
    study = optuna.create_study(study_name="a b")
    study.optimize(of_loss(tmp_path), n_trials=2)
    for number, trial in enumerate(study.trials):
        folder = tmp_path / "a_b" / f"trial-{number}"
        assert trial.user_attrs == {"run_dir": str(folder)}
        losses = {x["step"]: x["loss"] for x in records(folder) if x["split"] == "eval"}
        assert trial.intermediate_values == losses
        assert trial.value == min(losses.values())
        run = jddp.open_run(folder, trust="config")
        assert run.config["optimizer"]["learning_rate"] == trial.params["rate"]


def test_a_pruned_trial_ends_at_the_evaluation_that_decided(tmp_path):
    ends = [(x["state"], records(Path(x["run_dir"]))[-1]["step"]) for x in search(tmp_path, 0)]
    assert ends == [("COMPLETE", 6), ("PRUNED", 4)] * 2


def test_a_trial_whose_numbers_go_wrong_fails_and_the_study_continues(tmp_path):
    study = optuna.create_study()
    for rate in (1e30, 0.1):
        study.enqueue_trial({"rate": rate})

    def wide(trial):
        return {"optimizer.learning_rate": trial.suggest_float("rate", 1e-3, 1e30)}

    study.optimize(objective(config(tmp_path), wide, metric="loss"), n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


def test_the_folder_of_a_trial_with_other_values_is_refused(tmp_path):
    def search(num_steps, **others):
        study = optuna.create_study(study_name="anew")  # in memory, so its trials begin at 0
        study.enqueue_trial({"rate": 0.1})
        study.optimize(of_loss(tmp_path, **{"train.num_steps": num_steps, **others}), n_trials=1)
        return study.trials[0]

    first = search(4)
    assert search(4).value == first.value
    with pytest.raises(ConfigError, match=r"trial-0 has .*train.num_steps 4 -> 2"):
        search(2)
    with pytest.raises(ConfigError, match=r"another config: .*seed is 0 there, 1 here"):
        search(4, seed=1)
    assert [x["step"] for x in records(tmp_path / "anew" / "trial-0")][-1] == 4


def test_mistakes_are_reported_before_a_step(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="unknown key 'seeed'. Did you mean 'seed'"):
        of_loss(tmp_path, seeed=1)
    study = optuna.create_study(direction="maximize")
    with pytest.raises(UsageError, match="maximizes 'loss'.*direction='minimize'"):
        study.optimize(of_loss(tmp_path), n_trials=1)
    with pytest.raises(UsageError, match="The study has 2 directions"):
        optuna.create_study(directions=["minimize"] * 2).optimize(of_loss(tmp_path), n_trials=1)
    wrong = objective(config(tmp_path), suggest, metric="los")
    with pytest.raises(ConfigError, match=r"objective\(metric=\) watches 'los', .*mean 'loss'"):
        optuna.create_study().optimize(wrong, n_trials=1)
    for name, value in zip(VARIABLES, ("127.0.0.1:1", "2", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"call objective.optimize\(study, n_trials=...\) on each"):
        optuna.create_study().optimize(of_loss(tmp_path), n_trials=1)


@pytest.mark.processes
def test_two_processes_train_one_trial_as_one_process_does(tmp_path):
    run_module("workers.search", tmp_path, of_job(), 240)
    first, second = (json.loads((tmp_path / f"trials_{i}.json").read_text()) for i in range(2))
    assert second == []
    alone = search(tmp_path / "alone", 0)
    assert [(x["state"], x["rate"]) for x in first] == [(x["state"], x["rate"]) for x in alone]
    for one, two in zip(alone, first, strict=True):
        assert math.isclose(one["value"], two["value"], rel_tol=1e-5)
        assert len(records(Path(two["run_dir"]))) == len(records(Path(one["run_dir"])))
