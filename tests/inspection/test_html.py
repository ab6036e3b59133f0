"""What a notebook shows is text in columns that an export keeps."""

import importlib
import inspect
from html import unescape

import numpy as np
import optax
from house import DOORS, MODULES, name_of
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.data import ArrayExamples, TrainBatches, WorkerBatches, eval_batches
from jddp.data.source import make_data_set
from jddp.ground.typing import Shown
from jddp.trainer.run import Run

SHOWN = {"BucketPlan", "DataParallel", "DataSet", "Explanation", "Memory", "Run", "TrainBatches"}
SHOWN |= {"TrainState", "Verification", "WorkerBatches"}
ODD = "<script>alert('&amp;')</script>"


def text_of(shown):
    html = shown._repr_html_()
    assert html.startswith('<pre style="font-family: monospace;')
    assert html.count("<") == 2  # Nothing in it is a tag.
    return unescape(html)


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


def test_what_is_shown_has_its_size_position_and_last_records(tmp_path):
    arrays = {"x": np.ones((20, 3), np.float32), "y": np.zeros(20, np.int32)}
    examples, size = ArrayExamples(arrays), {"global_batch_size": 8}
    batches = TrainBatches(examples, **size, seed=0, num_epochs=2)
    next(batches)
    endless = TrainBatches(examples, **size, seed=0)
    run = Run(None, None, run_dir=tmp_path / ODD)
    run.interrupted = "SIGINT"
    run.evaluations.append({"step": 1200, "split": "eval", "loss": 0.41, ODD: 0.9})
    ddp = jddp.DataParallel(MLP(), optax.adam(0.1), loss_fn, mesh=2)
    for shown, text in (
        (batches, "20 examples, 8 a step, at position 8, 4 steps left"),
        (endless, "position 0, endless"),
        (WorkerBatches(endless, num_workers=2), f"WorkerBatches, 2 processes\n{endless}"),
        (eval_batches(examples, **size), "20 examples in 3 batches"),
        (make_data_set("mine", arrays, arrays, classes=[ODD]), "x: float32[3]\ny: int32[]"),
        (run, "interrupted by SIGINT"),
        (run, f"loss 0.41, {ODD} 0.9"),
        (ddp, str(ddp)),
        (jddp.memory(ddp, make_batch()), "the device has"),
    ):
        assert text in text_of(shown)
