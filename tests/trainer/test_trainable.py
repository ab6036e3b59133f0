"""A loop knows a `Trainable` and nothing else: an object without model, mesh or program will do."""

from threading import current_thread, main_thread
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import jddp
from jddp.engine.mesh import RowSplit, make_mesh, replicate
from jddp.engine.planned import PARTS, Program
from jddp.engine.state import CommState, Replicated, TrainState

BATCHES = [{"x": np.float32([i])} for i in range(6)]


class Adding:
    """Adds up its rows; its state before it runs is known to itself."""

    mesh, latest, topology = make_mesh(1), None, {}
    rows = RowSplit(1, 1, 1, "device")
    steps = property(lambda self: self)

    def __init__(self):
        self.seen = []  # evaluations: step and number of batches; whether the first thread compiles

    def init(self, seed=0, batch=None):
        values = {"params": {"sum": jnp.float32(0)}, "step": jnp.int32(0), "skipped": jnp.int32(0)}
        empty = {"ema_params": None, "model_state": {}, "opt_state": (), "comm_state": CommState()}
        return replicate(TrainState(**values, **empty, key=jax.random.key(seed)), self.mesh)

    def abstract_state(self, batch):
        return self.init()

    def step(self, state, batch):
        total = state.params["sum"] + batch["x"].sum()
        return state.replace(step=state.step + 1, params={"sum": total}), {"loss": total}

    def evaluate(self, state, batches, params):
        self.seen.append((int(state.step), len(list(batches))))
        return {"loss": float(state.params["sum"]), "examples": self.seen[-1][1]}

    def trace_evaluation(self, state, batch, params):
        return ["loss", "examples"]

    def lower(self, batch):
        return SimpleNamespace(compile=lambda: self.seen.append(current_thread() is main_thread()))

    def layouts(self, state):
        return jax.tree.map(lambda _: Replicated(), state)

    def program(self, state, batch):
        return Program(dict.fromkeys(PARTS, "a sum"), {})

    shard_batch = staticmethod(lambda batch: batch)


def test_an_object_that_only_adds_is_trained_evaluated_saved_and_resumed(tmp_path, capsys):
    def fit(num_steps):
        options = {"run_dir": tmp_path, "evaluate": BATCHES[:2], "log_every_steps": 1}
        return jddp.fit(Adding(), BATCHES, num_steps=num_steps, **options)

    assert [x["loss"] for x in fit(3).history] == [0, 1, 3, 3]
    run = fit(6)
    assert "resumed from step 3 of 6" in capsys.readouterr().out
    assert float(run.state.params["sum"]) == sum(range(6))
    assert run.eval_metrics["loss"] == 15


def test_a_new_run_compiles_beside_its_start_and_then_evaluates_a_batch_without_a_record(tmp_path):
    adding = Adding()
    options = {"run_dir": tmp_path, "evaluate": BATCHES[:2]}
    assert [x["step"] for x in jddp.fit(adding, BATCHES, num_steps=2, **options).evaluations] == [2]
    jddp.fit(adding, BATCHES, num_steps=4, **options)  # resumes: its evaluation has run
    jddp.fit(adding, BATCHES, num_steps=4, **options)  # has nothing to do, and compiles nothing
    assert adding.seen == [False, (0, 1), (2, 2), False, (4, 2)]
