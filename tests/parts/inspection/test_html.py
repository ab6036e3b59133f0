"""What a notebook shows is text in columns, and stays so where the notebook is exported."""

import importlib
import inspect

import numpy as np
import optax
from house import DOORS, MODULES, name_of
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.data import ArrayExamples, TrainBatches, WorkerBatches, eval_batches
from jddp.html import Shown

SHOWN = {"BucketPlan", "DataParallel", "Explanation", "Memory", "Run", "TrainBatches"}
SHOWN |= {"TrainState", "Verification", "WorkerBatches"}


def test_everything_that_a_notebook_shows_is_shown_by_one_helper_which_escapes_it():
    class Small(Shown):
        def __repr__(self):
            return "a < b"

    assert ">a &lt; b</pre>" in Small()._repr_html_()
    modules = [importlib.import_module(name_of(x)) for x in {*MODULES} - DOORS]
    classes = {cls for module in modules for _, cls in inspect.getmembers(module, inspect.isclass)}
    found = {cls for cls in classes if "_repr_html_" in dir(cls)} - {Shown}
    found = {cls for cls in found if cls.__module__.startswith("jddp")}
    assert {cls.__name__ for cls in found} >= SHOWN
    for cls in found:
        assert issubclass(cls, Shown)
        assert "_repr_html_" not in vars(cls), f"{cls.__name__} has HTML that is not the helper's"


def test_memory_is_a_table_of_what_a_device_needs_and_html_keeps_its_columns():
    ddp, batch = jddp.DataParallel(MLP(), optax.adam(0.1), loss_fn, mesh=2), make_batch()
    ddp.init(0, batch)
    memory = jddp.memory(ddp, batch)
    for shown in (ddp, ddp.plan, memory):  # where <pre> inherits a proportional font
        assert shown._repr_html_().startswith('<pre style="font-family: monospace;')
    lines = repr(memory).splitlines()
    assert lines[0] == "memory per device, MiB"
    names = [line[:17].strip() for line in lines[1:]]
    assert names[:3] == ["parameters", "gradients", "optimizer"]
    assert names[-2:] == ["sum", "the device has"]
    assert f"{memory.total / 2**20:,.2f}" in lines[-2]


def test_batches_show_their_size_and_position():
    examples = ArrayExamples({"x": np.ones((20, 3), np.float32), "y": np.zeros(20, np.int32)})
    batches = TrainBatches(examples, global_batch_size=8, seed=0, num_epochs=2)
    next(batches)
    endless = TrainBatches(examples, global_batch_size=8, seed=0)
    to_evaluate = eval_batches(examples, global_batch_size=8)
    for shown, text in (
        (batches, "TrainBatches: 20 examples, 8 a step, at position 8, 4 steps left"),
        (endless, "TrainBatches: 20 examples, 8 a step, at position 0, endless"),
        (WorkerBatches(endless, num_workers=2), f"WorkerBatches, 2 processes\n{endless}"),
        (to_evaluate, "evaluation batches: 20 examples in 3 batches"),
    ):
        assert repr(shown) == text
        assert "font-family: monospace" in shown._repr_html_()
