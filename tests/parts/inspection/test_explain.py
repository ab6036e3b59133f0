"""What `explain` and the plan tell is what was planned and compiled."""

import json

import optax
import pytest
from compiled import collectives
from tiny import MLP, ConvNet, loss_fn, make_batch

import jddp
from jddp.commands.explain import main

KIB = 1 / 1024


def wrapped(model=None, **options):
    return jddp.DataParallel(model or MLP(), optax.adam(1e-3), loss_fn, **options)


def test_an_explanation_counts_what_the_compiled_step_sends():
    ddp = wrapped(
        ConvNet(),
        reduction=jddp.Reduction(wire_dtype="bfloat16", bucket_mb=0.1 * KIB, layout="flat"),
    )
    reported = jddp.explain(ddp, make_batch())
    assert max(map(len, str(reported).splitlines())) <= 80
    assert reported._repr_html_().startswith("<pre")
    program = ddp.steps.lower(make_batch()).compile().as_text()
    found = [(x.op, x.num_elements) for x in reported.compiled]
    assert found == collectives(program)
    share = f"in {len(found)} collectives, with gradients in {len(reported.plan)} buckets; 0% of"
    assert share in reported.verdict
    told = json.loads(json.dumps(reported.as_json()))
    assert [(x["op"], x["num_elements"]) for x in told["collectives"]] == found
    assert sum(x["bytes"] for x in told["buckets"]) == reported.plan.wire_bytes
    rows = [line.split() for line in str(reported).splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["gradients"]] == [str(len(reported.plan))]
    assert [row[0] for row in rows if row[-2:] == ["and", "metrics"]] == ["1"]
    assert [row[0] for row in rows if "model," in row] == ["1", "1"]  # batch norm, either way


@pytest.mark.parametrize("name", ["", "max"])
def test_a_plan_names_the_hook(name):
    """HK-8."""
    ddp = wrapped(
        reduction=jddp.Reduction(hook=jddp.CommHook(lambda plan: (), max) if name else None)
    )
    ddp.init(0, make_batch())
    # The plan's bytes are those before a hook: it says so.
    assert ("hook 'max'" in str(ddp.plan)) == (name == "max")


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
