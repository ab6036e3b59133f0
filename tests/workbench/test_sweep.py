"""A sweep is the product of values; its runs are trained in turn, and a failure is named."""

import json
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import wait_until

from jddp.commands.training import run
from jddp.distributed.identity import VARIABLES
from jddp.ground.errors import ConfigError, ExitCode
from jddp.workbench.sweep import InTurn, Sweep

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
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            record = {"step": 2, "split": "eval", "accuracy": accuracy}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return code

    monkeypatch.setattr(InTurn, "run", run_turn)
    return SimpleNamespace(commands=commands, codes=codes)


@pytest.fixture
def sweep(tmp_path):
    def sweep(*words, overrides=()):
        return run([f"run.dir={tmp_path / 'runs'}", *overrides, "--sweep", *words])

    return sweep


def test_each_point_is_a_run_of_its_own_and_the_runs_are_compared(trained, sweep, tmp_path, capsys):
    assert sweep("seed=0,1", RATES, overrides=["train.num_steps=2"]) == 0
    assert len(trained.commands) == 4
    keys = ["train.num_steps=2", "seed=0", "optimizer.learning_rate=0.003"]
    folder = f"{tmp_path}/runs/seed=0,learning_rate=0.003"
    assert trained.commands[1] == [*keys, f"run.dir={folder}"]
    told = capsys.readouterr()
    assert "jddp: run 2 of 4: seed=0,learning_rate=0.003" in told.err.splitlines()
    assert told.out.startswith("\nseed=0,learning_rate=0.003 and seed=1,learning_rate=0.003 are ")


def test_a_run_that_fails_is_named_and_keeps_no_other_from_running(trained, sweep, capsys):
    trained.codes["seed=1"] = ExitCode.NUMERICS
    assert sweep("seed=0,1,2") == ExitCode.NUMERICS
    assert "jddp: 1 of 3 runs failed: seed=1 (exit code 80)" in capsys.readouterr().err
    del trained.commands[:]
    trained.codes["seed=1"] = ExitCode.PREEMPTED  # by a signal, which ends the sweep
    assert sweep("seed=0,1,2") == ExitCode.PREEMPTED
    assert len(trained.commands) == 2
    assert capsys.readouterr().err.endswith("stopped at seed=1. The same command resumes.\n")


@pytest.mark.parametrize(
    "words, message",
    [
        (["seed=0,1", "optimizer.learning_rat=1,2"], "Did you mean 'learning_rate'?"),
        (["seed=0,1", "optimizer.learning_rate=1,-2"], "optimizer.learning_rate"),
        (["seed=2"], "holds a run"),
    ],
)
def test_a_mistake_fails_before_the_first_run(trained, sweep, tmp_path, capsys, words, message):
    if "holds" in message:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "metrics.jsonl").touch()
    assert sweep(*words) == ExitCode.USAGE
    assert message in capsys.readouterr().err
    assert not trained.commands


def test_one_of_several_processes_starts_no_sweep_and_a_dry_run_lists_the_commands(
    trained, sweep, capsys, monkeypatch
):
    assert sweep("seed=0,1", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["jddp", "train"]] * 2
    assert lines[1].endswith("seed=1 " + lines[1].split()[-1])
    for name, value in zip(VARIABLES, ("127.0.0.1:1", "2", "0"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jddp.commands.training.leave_job", lambda code, error: None)
    assert sweep("seed=0,1") == ExitCode.USAGE
    assert "this is one of 2 processes" in capsys.readouterr().err
    assert not trained.commands


def test_points_are_the_product_named_by_the_keys_that_vary():
    sweep = Sweep.parse(["seed=0,1", "optimizer.learning_rate=1e-3,3e-3", "train.num_steps=20"])
    points = [*sweep.points()]
    assert sweep.num_points == len(points) == 4
    assert points[1].name == "seed=0,learning_rate=3e-3"
    assert points[1].overrides == ("seed=0", "optimizer.learning_rate=3e-3", "train.num_steps=20")
    assert [x.name for x in Sweep.parse(["seed=1,1,2"]).points()] == ["seed=1", "seed=2"]
    long = f"data.dir=/data/one,/data_one,{'long' * 50},{'long' * 51},../up"
    paths = [x.name for x in Sweep.parse([long]).points()]
    assert len(set(paths)) == 5
    assert not [name for name in paths if "/" in name or len(name) > 60]
    (values,) = Sweep.parse(["train.profile_steps=[1,2],[3,4],'a,b',my:A"]).values.values()
    assert values == ("[1,2]", "[3,4]", "'a,b'", "my:A")


@pytest.mark.parametrize("word", ["seed", "=1", "seed=1,,2", "seed=[1", "x=}", "run.dir=a,b"])
def test_words_of_another_form_are_refused(word):
    with pytest.raises(ConfigError, match="--sweep"):
        Sweep.parse([word])


def test_a_command_has_its_exit_code_and_the_streams_of_this_process(capfd):
    python = [sys.executable, "-S", "-c"]
    with InTurn() as turns:
        assert turns.run([*python, "print('here'); raise SystemExit(7)"]) == 7
        assert turns.run([*python, "import os; os.kill(os.getpid(), 9)"]) == 137
    assert capfd.readouterr().out == "here\n"


def test_a_stop_signal_is_passed_on_and_no_later_command_is_begun(tmp_path):
    started = tmp_path / "started"

    def stop():
        wait_until(started.exists)
        signal.raise_signal(signal.SIGTERM)

    with InTurn() as turns:
        threading.Thread(target=stop).start()
        program = f"trap 'kill $!; exit 75' TERM; touch {started}; sleep 30 & wait"
        assert turns.run(["sh", "-c", program]) == 75
        assert turns.run(["false"]) == ExitCode.PREEMPTED
