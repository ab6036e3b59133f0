"""A fast dev run does a little of everything that a job does, and keeps nothing."""

from pathlib import Path

import pytest

from jddp.commands.training import run
from jddp.config.files import load_config
from jddp.ground.errors import ExitCode
from jddp.trainer.job.build import build, fast_dev_run


def config(run_dir, *keys):
    own = ["model.name=mlp", "mesh.num_devices=2", "train.num_epochs=5", "checkpoint.every_steps=1"]
    return load_config([], [*own, f"run.dir={run_dir}", *keys])[0]


def contents(folder):
    return sorted(Path(folder).rglob("*"))


@pytest.mark.usefixtures("started_devices")
def test_a_trial_steps_evaluates_and_saves_and_keeps_nothing(tmp_path, capsys):
    whole = config(tmp_path / "new" / "runs")
    with fast_dev_run(whole) as short:
        made = build(short).run()
        assert made.checkpoints == ["checkpoints/3"]
        assert made.run_dir.parent == tmp_path
    assert [record["step"] for record in made.evaluations] == [2, 3]
    assert made.evaluations[0]["examples"] == 2 * whole.data.global_batch_size
    assert not contents(tmp_path)
    assert "nothing of it was kept" in capsys.readouterr().err


@pytest.mark.usefixtures("started_devices")
def test_the_command_tries_a_job_out_without_a_trace_or_a_sink(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path.parent))
    keys = ["model.name=mlp", "mesh.num_devices=2", "report.sinks=[tensorboard]"]
    assert run([*keys, "--fast-dev-run"]) == ExitCode.DONE
    said = capsys.readouterr()
    assert "eval 3  loss" in said.out
    assert "nothing of it was kept" in said.err
    assert str(tmp_path) not in said.out
    assert not contents(tmp_path)


def test_what_is_there_stays_and_a_failure_leaves_nothing_either(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.yaml").write_text("of another run")
    before = contents(tmp_path)
    trial = fast_dev_run(config(tmp_path / "runs"))
    with pytest.raises(ZeroDivisionError), trial as short:
        1 / len(contents(short.run.dir))
    assert contents(tmp_path) == before


def test_a_trial_of_a_sweep_is_refused(capsys):
    assert run(["--fast-dev-run", "--sweep", "seed=0,1"]) == ExitCode.USAGE
    assert "exclude each other" in capsys.readouterr().err
