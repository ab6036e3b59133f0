"""What a notebook shows is a table, or text in columns that an export keeps."""

import importlib
import inspect
from html.parser import HTMLParser

import numpy as np
import optax
from house import DOORS, MODULES, name_of
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.data import ArrayExamples, TrainBatches, WorkerBatches, eval_batches
from jddp.data.source import make_data_set
from jddp.ground.typing import Shown, TextTable
from jddp.trainer.run import Progress, Run

SHOWN = {"BucketPlan", "DataParallel", "DataSet", "Explanation", "Memory", "Run", "TrainBatches"}
SHOWN |= {"TrainState", "Verification", "WorkerBatches"}


class Reader(HTMLParser):
    """The cells of tables; refuses a tag that is not closed, and what runs or loads something."""

    def __init__(self, html):
        super().__init__()
        self.open, self.rows, self.text = [], [], ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def rows_of(shown):
    return Reader(shown._repr_html_()).rows


def row_of(shown, name):
    return next(row for row in rows_of(shown) if row[0] == name)


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
    assert ddp._repr_html_().startswith('<pre style="font-family: monospace;')
    assert row_of(memory, "sum")[1] == f"{memory.total / 2**20:,.2f}"
    lines = repr(memory).splitlines()
    assert lines[0] == "memory per device, MiB"
    names = [line[:17].strip() for line in lines[1:]]
    assert names[:3] == ["parameters", "gradients", "optimizer"]
    assert names[-3:] == ["sum", "start (init)", "the device has"]
    assert f"{memory.total / 2**20:,.2f}" in lines[-3]
    assert f"{memory.start / 2**20:,.2f}" in lines[-2]


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
        assert text in shown._repr_html_()


ODD = "<script>alert('&amp;')</script>"


def test_a_table_escapes_its_text_and_aligns_numbers_at_the_right():
    html = str(TextTable(ODD, [(ODD, "1,024"), ("b", "-2.5e-07")], (ODD, "MiB"), [ODD]))
    reader = Reader(html)
    assert reader.rows == [[ODD, "MiB"], [ODD, "1,024"], ["b", "-2.5e-07"]]
    assert reader.text.count(ODD) == 4
    assert html.count("text-align: right") == 3
    assert Reader(str(TextTable("empty"))).rows == []


def test_a_plan_and_an_explanation_show_a_row_for_each_bucket_and_collective():
    ddp, batch = jddp.DataParallel(MLP(), optax.adam(0.1), loss_fn, mesh=2), make_batch()
    ddp.init(0, batch)
    assert len(rows_of(ddp.plan)) == 1 + len(ddp.plan)
    explained = jddp.explain(ddp, batch)
    reader = Reader(explained._repr_html_())
    assert explained.verdict in reader.text
    assert ["number", "MiB", "dtype", "collective", "async", "for"] in reader.rows
    assert any(row[3:4] == ["all-reduce"] for row in reader.rows)


def test_a_run_shows_its_last_records_and_a_data_set_its_arrays(tmp_path):
    run = Run(None, None, run_dir=tmp_path / ODD)
    run.interrupted = "SIGINT"
    metrics = {"step": 1200, "split": "train", "loss": 0.5, "step_seconds": 0.1}
    run.progress = Progress(1200, metrics=metrics)
    run.evaluations.append({"step": 1200, "split": "eval", "loss": 0.41, ODD: 0.9})
    shown = Reader(run._repr_html_()).text
    for line in ("interrupted by SIGINT", "train  loss 0.5", f"eval   loss 0.41, {ODD} 0.9"):
        assert line in shown
    arrays = {"x": np.ones((20, 3, 2), np.float32), "y": np.zeros(20, np.int32)}
    data = make_data_set("mine", arrays, arrays, classes=["cat", ODD])
    assert rows_of(data)[1:] == [["x", "3 x 2", "float32"], ["y", "a number", "int32"]]
