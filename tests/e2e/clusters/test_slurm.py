"""Under a real Slurm a job detects its ranks, ends as a whole, and resumes when it is requeued."""

import json
import os
import re
import signal

import pytest
from faults.jobs import FEW, assert_alike, result, saved_steps
from runs import ROOT

from clusters.slurm import Slurm
from jddp.distributed.identity import first_host

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("slurm")]
TEMPLATE = ROOT / "scripts" / "slurm.sbatch"
FOUR = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1"]
TWO = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]
OFTEN = ["mesh.num_devices=4", "train.num_steps=400", "checkpoint.every_steps=20"]
ENDLESS = ["train.num_steps=1000000", "checkpoint.every_steps=1000000"]
WHO = """
import json
import socket

from jddp.distributed.identity import resolve_identity

i = resolve_identity()
print(json.dumps([i.process_id, i.num_processes, i.coordinator, socket.gethostname(),
                  i.local_device_ids]))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster):
    yield cluster
    cluster.end_jobs()


@pytest.fixture(scope="module")
def folder(jobs):
    (jobs / "who.py").write_text(WHO)
    return jobs


# Who a process is.


def ask(slurm, folder, *command, **variables):
    """Has the tasks that a command starts say who they are; returns that by their numbers."""
    done = slurm.run(*command, "python", "who.py", cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    return answers(done.stdout)


def answers(text):
    return sorted(map(json.loads, re.findall(r"\[.+\]", text)))


def assert_meet(found, num_processes, host):
    """They have numbers of their own, and all know where the first one is."""
    assert [one[0] for one in found] == list(range(num_processes))
    assert {one[1] for one in found} == {num_processes}
    (coordinator,) = {one[2] for one in found}
    assert coordinator.partition(":")[0] == found[0][3] == host


PART = "salloc --nodes=4 --ntasks=4 srun --nodes=2 --ntasks=2 --relative=2"  # of an allocation


@pytest.mark.parametrize(
    "command, count, host",
    [
        ("srun --nodes=4 --ntasks=4", 4, "n1"),
        ("srun --nodes=3 --ntasks=4 --distribution=cyclic", 4, "n1"),
        ("srun --nodelist=n4,n2 --ntasks=4", 4, "n2"),
        ("srun --nodes=2 --ntasks=4 --mpi=pmi2", 4, "n1"),
        (PART, 2, "n3"),
        (f"{PART} --mpi=pmi2", 2, "n3"),
    ],
)
def test_tasks_of_a_step_know_where_the_first_one_is(slurm, folder, command, count, host):
    assert_meet(ask(slurm, folder, *command.split()), count, host)


def test_tasks_in_an_order_of_your_own_meet_at_the_address_that_you_give(slurm, folder):
    (folder / "order").write_text("n3\nn1\nn2\nn2\n")
    environ = {"SLURM_HOSTFILE": "order", "JAX_COORDINATOR_ADDRESS": "n3:1234"}
    found = ask(slurm, folder, "srun", "--ntasks=4", "--distribution=arbitrary", **environ)
    assert_meet(found, 4, "n3")


def test_without_a_step_of_several_tasks_there_is_one_process(slurm, folder):
    alone = [[0, 1, None]]
    assert [x[:3] for x in ask(slurm, folder, "salloc", "--ntasks=4")] == alone
    assert [x[:3] for x in ask(slurm, folder, "srun", "--ntasks=1")] == alone
    job = slurm.submit("--ntasks=4", "--output=alone", "--wrap=python who.py", cwd=folder)
    assert slurm.end_of(job)["JobState"] == "COMPLETED"
    assert [x[:3] for x in answers((folder / "alone").read_text())] == alone
    # At a terminal, where the other task has none.
    shell = "srun --nodes=2 --ntasks=2 --pty python who.py"
    typed = slurm.run("script", "--quiet", "--command", shell, "typed", cwd=folder)
    assert [x[:3] for x in answers(typed.stdout)] == alone


@pytest.mark.parametrize(
    "options, ids",
    [
        ("--gpus-per-node=4", [[0, 1], [2, 3]]),
        ("--gpus-per-node=2", [[0], [1]]),
        ("--gpus-per-task=2", [None, None]),  # each sees its own two
        ("--gpus-per-node=4 --gpu-bind=single:1", [None, None]),
    ],
)
def test_tasks_of_a_host_take_gpus_of_their_own(slurm, folder, options, ids):
    options = ["--nodes=1", "--ntasks=2", *options.split()]
    assert [one[4] for one in ask(slurm, folder, "srun", *options, JAX_PLATFORMS="")] == ids


# What becomes of a job.


def training(folder, run, *arguments):
    """What trains, and where, and the compile cache of all tests' jobs."""
    command = ["--config", "job.yaml", f"run.dir={run}", *arguments]
    return command, {"cwd": folder, "XDG_CACHE_HOME": (folder / "cache").read_text()}


def submit(slurm, folder, run, options, *arguments):
    """Submits the template as it stands; options of sbatch win over those in it."""
    command, how = training(folder, run, *arguments)
    return slurm.submit(*options, f"--job-name={run}", TEMPLATE, *command, **how)


def wait_for_step(slurm, folder, run, job):
    """Waits until a job trains, as its log says."""

    def trains():
        assert slurm.job(job)["JobState"] in ("PENDING", "RUNNING"), log(folder, run, job)
        return "step 10/" in log(folder, run, job)

    slurm.wait_for(trains)


def log(folder, run, job):
    path = folder / f"{run}-{job}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_tasks_of_a_step_train_as_one_process(slurm, folder, one):
    command, how = training(folder, "step", *FEW, "mesh.num_devices=4")
    step = ["--nodes=2", "--ntasks=4", "python", "-m", "jddp.train", *command]
    done = slurm.run("srun", *step, **how)
    assert done.returncode == 0, done.stderr
    assert "job      4 processes, set by Slurm; process 0; coordinator n" in done.stdout
    assert_alike(result(folder, "step")[0], one)


@pytest.mark.long
def test_the_template_resumes_in_another_turn_bitwise_identically(slurm, folder, golden):
    job = submit(slurm, folder, "signalled", FOUR, *OFTEN)
    slurm.wait_for(lambda: saved_steps(folder / "signalled"))
    slurm.run("scancel", "--signal=TERM", job)  # to all tasks, as before a time limit
    ended, said = slurm.end_of(job), log(folder, "signalled", job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
    saved = re.search(r"SIGTERM: saved step (\d+) of 400", said)[1]
    for words in (
        f"jddp: start 1 of job {job} on n[1-2]\n",
        "job      4 processes, set by Slurm; process 0; coordinator n1:",
        "Exited with exit code 75",
        f"jddp: stopped in good order; job {job} waits for its next turn\n",
        f"jddp: start 2 of job {job} on ",
        f"resumed from step {saved} of 400",
    ):
        assert words in said
    assert "Terminated" not in said  # though Slurm ends those that leave last
    undisturbed = golden(*OFTEN, num_processes=4)
    assert result(folder, "signalled") == result(undisturbed.run_dir, ".")


@pytest.mark.slow
def test_a_task_that_is_killed_ends_its_job(slurm, folder):
    job = submit(slurm, folder, "killed", TWO, *ENDLESS)
    wait_for_step(slurm, folder, "killed", job)
    os.kill(slurm.task(1), signal.SIGKILL)
    ended, said = slurm.end_of(job), log(folder, "killed", job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), said
    assert ended["ExitCode"] in ("137:0", "143:0")  # of the task, or of those that Slurm ends
    assert "n2: task 1: Killed" in said


@pytest.mark.slow
def test_a_job_whose_node_dies_resumes_on_another_and_saves_when_it_is_cancelled(tmp_path, folder):
    with Slurm(tmp_path) as slurm:
        job = submit(slurm, folder, "orphaned", TWO, *ENDLESS[:1], "checkpoint.every_steps=20")
        slurm.wait_for(lambda: saved_steps(folder / "orphaned"))
        slurm.end_node("n1")  # where the batch script and process 0 are
        # Which Slurm finds out by itself after SlurmdTimeout, five minutes.
        slurm.run("scontrol", "update", "nodename=n1", "state=down", "reason=dead")
        slurm.wait_for(lambda: "resumed from step" in log(folder, "orphaned", job))
        assert first_host(slurm.job(job)["NodeList"]) != "n1"
        before = saved_steps(folder / "orphaned")[-1]
        slurm.wait_for(lambda: saved_steps(folder / "orphaned")[-1] > before)
        slurm.run("scancel", job)
        ended, said = slurm.end_of(job), log(folder, "orphaned", job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1"), said
    (saved,) = re.findall(r"SIGTERM: saved step (\d+) of", said)
    assert (folder / "orphaned" / "checkpoints" / saved / "arrays.json").exists()
