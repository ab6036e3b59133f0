"""One process of a job that searches the learning rate of a line with Optuna; and its config."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optuna

import jddp
from jddp.workbench.objective import objective

CONFIG = {
    "seed": 0,
    "data": {"target": "workers.mine:points", "global_batch_size": 8},
    "model": {"target": "flax.linen:Dense", "kwargs": {"features": 1}},
    "loss": {"name": "mean_squared_error"},
    "optimizer": {"name": "sgd", "schedule": {"name": "constant_schedule"}},
    "train": {"num_steps": 6, "eval_every_steps": 2},
    "mesh": {"num_devices": 2},
}


def suggest(trial):
    return {"optimizer.learning_rate": trial.suggest_float("rate", 1e-3, 1.0, log=True)}


class WorstHalf(optuna.pruners.BasePruner):
    """Prunes every other trial at its second evaluation."""

    def prune(self, study, trial):
        decision = trial.number % 2 == 1 and len(trial.intermediate_values) == 2
        return np.bool_(decision)  # as that of MedianPruner


def config(folder):
    return jddp.Config(**CONFIG, run={"dir": str(folder)})


def search(folder, process_index):
    """Runs four trials; returns those of the study of process 0."""
    study = optuna.create_study(
        study_name="line",
        sampler=optuna.samplers.RandomSampler(seed=process_index),
        pruner=WorstHalf(),
    )
    objective(config(folder), suggest, metric="loss").optimize(study, n_trials=4)
    return [
        {"state": x.state.name, "value": x.value, "rate": x.params["rate"], **x.user_attrs}
        for x in study.trials
    ]


if __name__ == "__main__":
    from jddp import distributed
    from jddp.distributed.join import configure_devices

    identity = distributed.resolve_identity()
    configure_devices(2, num_processes=identity.num_processes)
    distributed.initialize(identity)
    folder = Path(sys.argv[1])
    trials = search(folder / "runs", jax.process_index())
    (folder / f"trials_{jax.process_index()}.json").write_text(json.dumps(trials))
