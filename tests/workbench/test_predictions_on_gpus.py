"""Steps are compiled for described GPUs, and explained with what is modelled of them."""

import json
import re

import optax
import pytest
from tiny import MLP, ConvNet, loss_fn, make_batch

import jddp
from jddp.commands.checks import explain_command as main
from jddp.commands.training import run as train
from jddp.ground.errors import ConfigError
from jddp.workbench.tune import main as tune

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("as_users_compile")]

JOB = ["model.name=mlp", "data.global_batch_size=64"]


def explained(topology="1x8", model=None, **options):
    ddp = jddp.DataParallel(model or ConvNet(), optax.adam(1e-3), loss_fn, mesh=2, **options)
    return jddp.explain(ddp, make_batch(), target="h100", topology=topology)


@pytest.mark.parametrize("topology", ["1x8", "2x4"])
def test_a_step_is_compiled_for_other_devices_than_its_own(topology):
    found = explained(topology)
    assert found.num_devices == 8
    assert found.prediction.verdict.startswith("Modelled: 32-bit gradients of")
    assert f"modelled: {topology[0]} x {topology[2]} NVIDIA H100" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80
    labels = [x.label for x in found.prediction.groups if x.label]
    assert labels == [f"bucket {i}" for i in range(len(found.plan))]
    purposes = {x.purpose for x in found.prediction.groups}
    assert {"the model, forward", "the model, backward"} <= purposes  # batch norm
    assert found.prediction.memory.parameters == 4 * (3 * 3 * 4 + 2 * 4 + 5 * 4)


FORMS = [
    ({"strategy": "zero1"}, "gradients and parameters"),
    ({"strategy": "fsdp"}, "gradients and parameters"),
    ({"reduction": "bfloat16"}, "Modelled: 16-bit gradients"),
    ({"accumulate_steps": 4}, "32-bit gradients"),
    ({"strategy": jddp.LocalSteps(3)}, "synchronizes replicas every 3 steps"),
]


@pytest.mark.parametrize("options, words", FORMS)
def test_each_form_of_a_step_is_modelled_as_it_is_configured(options, words):
    found = explained("1x4", MLP(), **options)
    assert words in found.prediction.verdict
    assert found.prediction.planned


def test_the_command_prints_a_step_for_more_hosts(capsys):
    words = ["--target", "h100", "--topology", "2x4", "--link", "nic=25GB/s,5us"]
    assert main([*JOB, *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["prediction"]
    assert (told["num_hosts"], told["devices_per_host"]) == (2, 4)
    assert told["links"]["nic"]["bytes_per_second"] == 25e9
    assert main([*JOB, *words]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Modelled: 32-bit gradients of")
    assert train([*JOB, "--dry-run", *words]) == 0
    assert capsys.readouterr().out == printed


def test_a_step_is_scaled_by_the_program_of_eight_hosts_and_slower_networks():
    ddp = jddp.DataParallel(MLP(), optax.adam(1e-3), loss_fn, mesh=2)
    found = jddp.explain(ddp, make_batch(), target="h100", topology="1x2", scaling=True)
    scaling = found.prediction.scaling
    assert [x.num_devices for x in scaling] == [2, 16, 64, 256]
    assert [x.compiled_for for x in scaling] == [2, 16, 16, 16]
    assert scaling[0].step_seconds == found.prediction.timeline.step_seconds
    seconds = [x.step_seconds for x in scaling]
    assert seconds == sorted(seconds)
    assert [x.efficiency for x in scaling] == [seconds[0] / x for x in seconds]
    wide = jddp.FSDP(group_size=4)
    wide = jddp.DataParallel(MLP(), optax.adam(1e-3), loss_fn, mesh=4, strategy=wide)
    words = r"needs the step for 2 x NVIDIA H100 80GB HBM3 too\. .*group_size=4 does not divide 2"
    with pytest.raises(ConfigError, match=words):
        jddp.explain(wide, make_batch(), target="h100", topology="2x2", scaling=True)


def test_a_traced_run_is_shown_beside_its_modelled_step(tmp_path, capsys):
    run = tmp_path / "run"
    traced = ["train.num_steps=3", "train.profile_steps=[2,3]", "train.eval_every_steps=null"]
    assert train([*JOB, *traced, "mesh.num_devices=2", f"run.dir={run}"]) == 0
    capsys.readouterr()  # with the path of the run, which stays whole
    words = ["--trace", str(run), "--target", "h100", "--topology", "1x2"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\n +measured +modelled\n", printed)
    assert max(map(len, printed.splitlines())) <= 80
    (run / "config.yaml").unlink()
    assert main(words) == 2
    assert "config.yaml is not there. Name the config" in capsys.readouterr().err


def test_rows_that_do_not_divide_over_hosts_are_refused():
    with pytest.raises(ConfigError, match="16 rows does not divide over 3 hosts"):
        explained("3x1")


def test_candidates_are_modelled_and_the_largest_batch_is_found_by_compiling(capsys):
    target = ["--target", "h100", "--topology", "1x2"]
    assert tune([*JOB, *target, "--minutes", "-1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["candidates"]
    assert found["keys"] == {}
    assert 0 < found["seconds"] < 1e-3
    assert 0 < found["exposed_share"] < 1
    assert tune([*JOB, *target, "--batch"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # Lines end where their figures let them.
    assert printed.startswith("data.global_batch_size=14")  # of 15,000 examples
    assert printed.endswith("of 80.0 GB of a device, modelled for 1x2 h100; the data hold no more")
