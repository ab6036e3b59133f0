"""The runs of a sweep are trained in turn; a failure is named, and what has finished stays."""

import json
from types import SimpleNamespace

import pytest

from jddp.commands.training import run
from jddp.errors import ExitCode
from jddp.workbench import sweep_folder, sweeping

RATES = "optimizer.learning_rate=0.001,0.003"


@pytest.fixture
def trained(monkeypatch):
    """Runs that are not trained: their commands, and the exit code of each by a word in it."""
    commands = []
    codes = {}

    def run_turn(turns, command):
        commands.append(command[3:])
        (folder,) = (word.removeprefix("run.dir=") for word in command if "run.dir=" in word)
        accuracy = 0.9 if "learning_rate=0.003" in folder else 0.8
        code = next((codes[word] for word in codes if word in folder), 0)
        if code == 0:
            folder = sweep_folder.Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            record = {"step": 2, "split": "eval", "accuracy": accuracy}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return code

    monkeypatch.setattr(sweep_folder.InTurn, "run", run_turn)
    return SimpleNamespace(commands=commands, codes=codes)


@pytest.fixture
def sweep(tmp_path):
    def sweep(*words, overrides=()):
        return run([f"run.dir={tmp_path / 'runs'}", *overrides, "--sweep", *words])

    return sweep


def test_each_point_is_a_run_of_its_own_and_the_runs_are_compared(trained, sweep, tmp_path, capsys):
    assert sweep("seed=0,1", RATES, overrides=["train.num_steps=2"]) == 0
    assert len(trained.commands) == 4
    assert trained.commands[1] == [
        "train.num_steps=2",
        "seed=0",
        "optimizer.learning_rate=0.003",
        f"run.dir={tmp_path}/runs/seed=0,learning_rate=0.003",
    ]
    told = capsys.readouterr()
    assert "jddp: run 2 of 4: seed=0,learning_rate=0.003" in told.err.splitlines()
    assert told.out.startswith("\nseed=0,learning_rate=0.003 and seed=1,learning_rate=0.003 are ")


def test_runs_that_have_finished_are_left_out_unless_their_config_has_changed(trained, sweep):
    assert sweep("seed=0,1", overrides=["train.num_steps=2"]) == 0
    del trained.commands[:]
    assert sweep("seed=0,1,2", overrides=["train.num_steps=2"]) == 0
    assert [words[-2] for words in trained.commands] == ["seed=2"]
    assert sweep("seed=0,1", overrides=["train.num_steps=3"]) == 0
    assert len(trained.commands) == 3


def test_a_run_that_fails_is_named_and_keeps_no_other_from_running(trained, sweep, capsys):
    trained.codes["seed=1"] = ExitCode.NUMERICS
    assert sweep("seed=0,1,2") == ExitCode.NUMERICS
    told = capsys.readouterr().err.splitlines()
    assert "jddp: seed=1: exit code 80" in told
    assert told[-1] == (
        "jddp: 1 of 3 runs failed: seed=1 (exit code 80). The same command tries them again."
    )
    del trained.commands[:]
    trained.codes.clear()
    assert sweep("seed=0,1,2") == 0
    assert [words[-2] for words in trained.commands] == ["seed=1"]


def test_a_run_that_a_signal_stops_ends_the_sweep(trained, sweep, capsys):
    trained.codes["seed=1"] = ExitCode.PREEMPTED
    assert sweep("seed=0,1,2") == ExitCode.PREEMPTED
    assert len(trained.commands) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "jddp: stopped at seed=1. The same command resumes."
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["seed=0,1", "optimizer.learning_rat=1,2"], "Did you mean 'learning_rate'?"),
        (["seed=0,1", "optimizer.learning_rate=1,-2"], "optimizer.learning_rate"),
        (["seed"], "not of the form key.path=value,value"),
    ],
)
def test_a_mistake_in_a_key_or_a_value_fails_before_the_first_run(
    trained, sweep, capsys, words, message
):
    assert sweep(*words) == ExitCode.USAGE
    assert message in capsys.readouterr().err
    assert not trained.commands


def test_the_folder_of_a_run_is_none_for_a_sweep(trained, sweep, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").touch()
    assert sweep("seed=0,1") == ExitCode.USAGE
    assert "runs holds a run. Give the runs of a sweep a folder of their own" in (
        capsys.readouterr().err
    )


def test_very_many_runs_are_asked_for_first(trained, sweep, capsys, monkeypatch):
    many = "seed=" + ",".join(map(str, range(10_000)))
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert sweep(many) == ExitCode.USAGE
    assert "--sweep: 10,000 runs, one after the other, in" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer in ("", "no"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert sweep(many) == ExitCode.USAGE
        assert "nothing was trained" in capsys.readouterr().err
    assert not trained.commands
    monkeypatch.setattr(sweeping, "MOST", 1)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert sweep("seed=0,1") == 0
    assert sweep("seed=2,3", "--yes") == 0


def test_one_of_several_processes_starts_no_sweep_and_a_dry_run_lists_the_commands(
    trained, sweep, capsys, monkeypatch
):
    assert sweep("seed=0,1", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["jddp", "train"]] * 2
    assert lines[1].endswith("seed=1 " + lines[1].split()[-1])
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2"}
    for name, value in {**address, "JAX_PROCESS_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jddp.commands.training.leave_job", lambda code, error: None)
    assert sweep("seed=0,1") == ExitCode.USAGE
    assert "this is one of 2 processes" in capsys.readouterr().err
    assert not trained.commands
