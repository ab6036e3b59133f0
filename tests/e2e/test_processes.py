"""Two real processes over localhost train as one does, and a killed loop of your own resumes."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from runs import ROOT, environment, of_job, records, run_job, run_module
from workers.job import train_everything
from workers.two import AT, LENGTH

from jddp.checkpoint.folders import finished

pytestmark = pytest.mark.processes

SHARDED = ["split", "divided", "grouped"]
SECONDS = 120  # for what takes ten; a process that is stuck is killed


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What this process ends up with, on eight devices of its own."""
    folder = tmp_path_factory.mktemp("one")
    train_everything(folder, 0, 1)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes with four devices each end up with, and what they have written."""
    folder = tmp_path_factory.mktemp("two")
    jobs = of_job(JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return folder, run_module("workers.job", folder, jobs, SECONDS)


def run_two(case, folder):
    """Runs two processes; returns what each has written."""
    return run_module("workers.two", folder, of_job(), SECONDS, case)


def assert_close(got, want):
    """Equal names, and numbers but for the order in which gloo adds up eight terms."""
    assert got.keys() == want.keys()
    for name in want:
        if isinstance(want[name], str):
            assert got[name] == want[name]
        else:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def load(path):
    return dict(np.load(path))


@pytest.mark.parametrize("what", ["step", "own", "fit", *SHARDED])
def test_two_processes_end_bitwise_alike_with_the_state_and_metrics_of_one(one, two, what):
    want = load(one / f"{what}_0.npz")
    first, second = (load(two[0] / f"{what}_{process}.npz") for process in range(2))
    assert_close(first, want)
    assert want["metrics/examples"] == 11
    assert "state/params/Conv_0/kernel" in want
    assert ("state/ema_params/Conv_0/kernel" in want) == (what not in SHARDED)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_only_the_first_process_writes_metrics(one, two):
    want, got = records(one / "run"), records(two[0] / "run")
    train = [(step, "train") for step in (1, 2, 3, 4)]
    steps = [(record["step"], record["split"]) for record in got]
    assert steps == [*train[:2], (2, "eval"), *train[2:], (4, "eval")]
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_only_the_first_process_speaks_and_of_nothing_but_the_run(two):
    (said, _), (silence, _) = two[1]
    assert "resumed from step 4 of 4" in said  # It was saved before it was evaluated.
    assert "eval 4  loss " in said
    assert not silence
    assert not any(re.search("absl|orbax", text) for texts in two[1] for text in texts)


GIVEN = [
    "num_steps is 30 there and 20 here",
    "seed is 1 there and 0 here",
    "evaluate is given there and none here",
    "batches: seed is 1 there and 0 here",
    "batches: num_examples is 56 there and 64 here",
    "batches: number of batches is 2 there and 1 here",
    "batches= of processes 0 and 1 are the same",
    "evaluate= of processes 0 and 1 are the same",
]


@pytest.mark.slow
def test_what_processes_were_given_is_compared_before_the_first_step():
    devices = {"JAX_NUM_CPU_DEVICES": "1"}
    for said, _ in run_job([sys.executable, "-m", "workers.given"], devices, devices):
        refused = [line for line in said.splitlines() if line.startswith("78 ")]
        assert len(refused) == len(GIVEN), said
        assert all(words in line for words, line in zip(GIVEN, refused, strict=True)), said
        assert "a step was taken" not in said
        assert said.endswith("the end\n")


def start(directory):
    command = [sys.executable, ROOT / "examples" / "own_loop.py", directory]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def end_of(directory):
    """The digest of every array of the last state, and what was saved beside it."""
    last = directory / "200"
    return (last / "arrays.json").read_text(), json.loads((last / "run.json").read_text())["extra"]


def test_a_loop_that_is_killed_ends_bitwise_identical(tmp_path):
    with start(tmp_path / "killed") as process:
        assert any(said.startswith("step 120") for said in process.stdout)
        process.kill()  # while a state is being copied or written
    for name in ("killed", "undisturbed"):
        with start(tmp_path / name) as process:
            first = process.stdout.readline()
            process.stdout.read()
        assert process.returncode == 0
        assert first.startswith("resumed from step 1" if name == "killed" else "step 10:")
    assert end_of(tmp_path / "killed") == end_of(tmp_path / "undisturbed")


def test_two_folders_that_are_saved_at_one_step_are_each_complete_or_refused(tmp_path):
    for said, _ in run_two("two_folders", tmp_path):
        first, second = said.splitlines()
        assert first.startswith("checkpoints is refused:")
        assert "process 1: [Errno 28] No space left" in first
        assert second == "best is saved"
    assert finished(tmp_path / "checkpoints") == []
    assert finished(tmp_path / "best") == [4]


def test_a_step_is_replayed_on_devices_of_other_processes_and_each_names_the_wrong_one(tmp_path):
    jobs = of_job(JAX_NUM_CPU_DEVICES="2")
    (first, _), (second, _) = run_module("workers.two", tmp_path, jobs, SECONDS, "replays")
    assert first == second
    assert first.startswith("loss ")
    wrong = r"device \d+ \(process 1, host \S+\) is wrong.* differs is params/Conv_0/kernel\."
    assert re.search(wrong, first.splitlines()[-1])


def test_no_process_compiles_at_the_second_start_what_it_has_compiled_at_the_first(tmp_path):
    for expected in (range(5, 100), [0]):
        cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
        jobs = of_job(**cache, JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")
        run_module("workers.two", tmp_path, jobs, SECONDS, "compiles")
        counts = [json.loads((tmp_path / f"process_{x}.json").read_text()) for x in range(2)]
        assert all(count in expected for count in counts), counts


def test_the_memory_of_two_hosts_is_complete_without_either_of_them(tmp_path):
    hosts = of_job()
    for number, variables in enumerate(hosts):
        (tmp_path / str(number)).mkdir()
        variables["JDDP_MEMORY_DIR"] = str(tmp_path / str(number))
    run_module("workers.two", tmp_path, hosts, SECONDS, "keeps_in_memory")
    assert not [*tmp_path.glob("*/*")]


@pytest.mark.slow
def test_what_one_process_asks_all_do_at_one_step_and_what_all_ask_at_that_one(tmp_path):
    run_two("asks", tmp_path)
    first, second = (json.loads((tmp_path / f"process_{x}.json").read_text()) for x in range(2))
    assert first["stop"]["stopped"] == second["stop"]["stopped"] == "time limit"
    assert AT <= first["stop"]["step"] == second["stop"]["step"] < LENGTH
    assert [first[x]["step"] for x in ("save", "last")] == [LENGTH] * 2
    for name, folders in (("save", ["kept", "end"]), ("last", ["both"])):
        assert first[name]["saved"] == second[name]["saved"]
        assert {x.partition("/")[0] for x in first[name]["checkpoints"]} == {
            "checkpoints",
            *folders,
        }
    # Both asked: at the step of the call, which would have been saved and evaluated there anyway.
    for both in (first["both"], second["both"]):
        assert both["asked_at"] == both["step"] == AT
        assert both["checkpoints"] == [f"both/{AT}", f"checkpoints/{AT}"]
    for watched in (first["watched"], second["watched"]):  # two evaluations, of steps 2 and 4
        assert watched["step"] == 4
        assert watched["checkpoints"] == [f"best/{watched['best']}", "checkpoints/4"]
