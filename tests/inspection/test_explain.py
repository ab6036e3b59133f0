"""What is communicated, and what explain, the plan and a notebook tell of it."""

import importlib
import inspect
import json
from html import unescape

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from house import DOORS, MODULES, name_of
from jax import lax
from tiny import MLP, NUM_CLASSES, ConvNet, NnxConvNet, loss_fn, make_batch, wrapped

import jddp
from jddp.commands.checks import explain_command as main
from jddp.data import ArrayExamples, TrainBatches, WorkerBatches, eval_batches
from jddp.data.source import make_data_set
from jddp.ground.errors import ConfigError
from jddp.ground.typing import Shown
from jddp.inspection.hlo import collectives as collectives_of
from jddp.inspection.hlo import is_backward, read_program
from jddp.trainer.run import Run
from jddp.workbench.described import Target

pytestmark = pytest.mark.usefixtures("started_devices")


def collectives(text):
    """(op, number of elements) of each collective of a program, in its order."""
    return [(x.op, x.num_elements) for x in collectives_of(read_program(text))]


def test_an_explanation_counts_what_the_compiled_step_sends():
    reduction = jddp.Reduction(wire_dtype="bfloat16", bucket_mb=0.1 / 1024, layout="flat")
    ddp = wrapped(ConvNet(), reduction=reduction)
    reported = jddp.explain(ddp, make_batch())
    assert max(map(len, str(reported).splitlines())) <= 80
    assert reported._repr_html_().startswith("<pre")
    program = ddp.steps.lower(make_batch()).compile().as_text()
    found = [(x.op, x.num_elements) for x in reported.compiled]
    assert found == collectives(program)
    assert f"in {len(found)} collectives" in reported.verdict
    told = json.loads(json.dumps(reported.as_json()))
    assert [(x["op"], x["num_elements"]) for x in told["collectives"]] == found
    assert sum(x["bytes"] for x in told["buckets"]) == reported.plan.wire_bytes
    rows = [line.split() for line in str(reported).splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["gradients"]] == [str(len(reported.plan))]
    assert [row[0] for row in rows if row[-2:] == ["and", "metrics"]] == ["1"]
    assert [row[0] for row in rows if "model," in row] == ["1", "1"]  # batch norm, either way


def neighbor_loss(model, batch):
    """Each row of replica 1 beside the same row of replica 0, which sends it."""
    x = model(batch["x"], True)
    return ((x - lax.ppermute(x, jddp.AXIS, [(0, 1)])) ** 2).mean(-1)


def test_what_a_model_sends_from_device_to_device_is_listed_with_its_pairs():
    ddp, batch = wrapped(loss=neighbor_loss), make_batch()
    reported = jddp.explain(ddp, batch)
    sent = [x for x in reported.as_json()["collectives"] if x["op"] == "collective-permute"]
    assert [x["for"] for x in sent] == ["the model, forward", "the model, backward"]
    assert [x["pairs"] for x in sent] == [[[0, 1]], [[1, 0]]]
    assert {x["bytes"] for x in sent} == {len(batch["x"]) // 2 * NUM_CLASSES * 4}
    assert str(reported).count("  f32    collective-permute no     the model, ") == 2


def test_a_plan_names_the_hook():
    for hook in (None, jddp.CommHook(lambda plan: (), max)):
        ddp = wrapped(reduction=jddp.Reduction(hook=hook))
        ddp.init(0, make_batch())
        # The plan's bytes are before a hook: it says so.
        assert ("hook 'max'" in str(ddp.plan)) == (hook is not None)


def test_the_command_explains_the_step_of_a_job_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = ["model.name=mlp", "data.global_batch_size=8"]
    assert main([*job, "mesh.num_devices=2"]) == 0
    assert capsys.readouterr().out.startswith("A step sends ")
    assert main([*job, "mesh.num_devices=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "Nothing is sent: there is one device."
    assert main([*job, "model.nme=mlp"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_target_is_refused_in_one_line_where_it_is_unknown_or_cannot_be(monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    for arguments, message in (
        (["--target", "h10"], "Did you mean 'h100_sxm'?"),
        (["--topology", "1x8"], "--topology needs --target"),
        (["--target", "h100"], "pip install 'jddp[aot]'"),
    ):
        assert main(["model.name=mlp", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_a_step_that_the_compiler_refuses_for_a_target_is_one_error_with_its_words(monkeypatch):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: no kernel for f8.\nStack trace: ...")

    monkeypatch.setattr(Target, "mesh", lambda self: jax.make_mesh((8,), ("data",)))
    monkeypatch.setattr("jax.stages.Lowered.compile", fail)
    message = "does not compile for 8 x NVIDIA H100 80GB HBM3: INTERNAL: no kernel for f8. Change"
    with pytest.raises(ConfigError, match=message):
        jddp.explain(wrapped(), make_batch(), target="h100")


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


KIB = 1 / 1024


def step_collectives(model, **options):
    ddp, batch = wrapped(model, mesh=None, **options), make_batch()
    return ddp.steps.planned(batch).plan, collectives(ddp.steps.lower(batch).compile().as_text())


@pytest.mark.parametrize("bucket_mb", [0.1 * KIB, 0.5 * KIB, 25])
def test_flat_buckets_survive_compilation_and_one_small_vector_travels_beside_them(bucket_mb):
    leaf, flat = (jddp.Reduction(bucket_mb=bucket_mb, layout=x) for x in ("leaf", "flat"))
    plan, found = step_collectives(MLP(), reduction=flat)
    assert {op for op, _ in found} == {"all-reduce"}
    sizes = sorted(size for _, size in found)
    small = 4  # loss and accuracy, each a total and a count
    assert sizes == sorted([small, *(bucket.size for bucket in plan.buckets)])
    assert len(plan) == {0.1 * KIB: 4, 0.5 * KIB: 2, 25: 1}[bucket_mb]
    # XLA:CPU makes one collective of all leaves, the small vector included.
    _, found = step_collectives(MLP(), reduction=leaf)
    assert [size for _, size in found] == [sum(sizes)]


@pytest.mark.parametrize("model", [ConvNet(), NnxConvNet(nnx.Rngs(0))], ids=["linen", "nnx"])
def test_synced_batch_norm_adds_one_collective_a_direction_and_local_none(model):
    for batch_norm, num in (("sync", 2), ("local", 0)):
        options = {"reduction": jddp.Reduction(layout="flat"), "batch_norm": batch_norm}
        plan, found = step_collectives(model, **options)
        assert len(found) == len(plan) + 1 + num


def test_evaluation_sends_one_small_vector_and_making_the_state_nothing():
    ddp, batch = wrapped(ConvNet(), mesh=None), make_batch()
    state = ddp.init(0, batch)
    rows, valid = ddp.shard_batch((batch, batch["x"][:, 0]))
    values = state.params, state.model_state
    lowered = ddp._evaluate.lower(state.key, values, 0, ddp.steps.inputs(rows), valid)
    assert collectives(lowered.compile().as_text()) == [("all-reduce", 6)]
    example = ddp.steps.inputs(jax.tree.map(lambda x: x[:2], batch))
    assert collectives(ddp.steps.init.lower(0, example, None, None).compile().as_text()) == []


def test_operations_of_the_backward_pass_are_known_by_their_names():
    for name in ("transpose(jvp(loss))/model/dot", "loss/model/dot"):  # the second of newer JAX
        assert is_backward(f"jit(step)/shard_map/{name}")
    for name in ("jvp(jit(run_and_settle))/loss/model/dot", "optimizer_update/mul"):
        assert not is_backward(f"jit(step)/shard_map/{name}")
