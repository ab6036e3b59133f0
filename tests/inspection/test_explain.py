"""What `explain` and the plan tell is what was planned and compiled."""

import json

import jax
import pytest
from compiled import collectives
from jax import lax
from tiny import NUM_CLASSES, ConvNet, make_batch, wrapped

import jddp
from jddp.commands.checks import explain_command as main
from jddp.ground.errors import ConfigError
from jddp.workbench.described import Target

pytestmark = pytest.mark.usefixtures("started_devices")


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
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "Nothing is sent: there is one device."
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
