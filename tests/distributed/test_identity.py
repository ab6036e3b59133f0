"""What each scheduler's environment makes of a process, and what of it is refused."""

import os
import socket
import subprocess
from pathlib import Path

import optax
import pytest
from tiny import MLP, loss_fn, make_batch

import jddp
from jddp.distributed.coordination import explain_unjoined
from jddp.distributed.identity import (
    FIRST_PORT,
    NUM_PORTS,
    Identity,
    first_host,
    port_of,
    resolve_identity,
)
from jddp.ground.errors import ConfigError, UsageError
from jddp.inspection.doctor import check_job


def env(text):
    """Variables, as a shell has them."""
    return dict(pair.split("=", 1) for pair in text.split())


JAX = env("JAX_COORDINATOR_ADDRESS=a:1 JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=3")
V6 = env("JAX_COORDINATOR_ADDRESS=[fe80::1]:65535")
LAUNCHED = JAX | env("JDDP_LAUNCHED=jddp.launch")
MASTER = env("MASTER_ADDR=b MASTER_PORT=29500 WORLD_SIZE=4")  # of all tasks alike
TORCHRUN = MASTER | env("RANK=3 LOCAL_WORLD_SIZE=2 LOCAL_RANK=1")
ALLOCATION = env("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-4] SLURM_NTASKS=4")
BATCH = ALLOCATION | env("SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0")
STEP = ALLOCATION | env(
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[2-3] SLURM_STEP_NUM_TASKS=4 "
    "SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NODEID=1 SLURM_PROCID=3 SLURM_LOCALID=1"
)
_OMPI = {"SIZE": "4", "RANK": "3", "LOCAL_SIZE": "2", "LOCAL_RANK": "1"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in _OMPI.items()}
OPEN_MPI_4 = OPEN_MPI | env(
    "OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.0.0.1,10.1.0.1:34911;tcp6://[fd00::2]:48309 "
    "PMIX_NAMESPACE=1531576321"
)
OPEN_MPI_5 = OPEN_MPI | env("PMIX_NAMESPACE=prterun-login-1-4242@1 PMIX_SERVER_URI2=prterun@0.1;")
MPICH = env("PMI_FD=8 PMI_SIZE=4 PMI_RANK=3 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1")
INDEXED = env("JOB_COMPLETION_INDEX=3 JAX_NUM_PROCESSES=4")
TPU_HOSTS = env("TPU_WORKER_HOSTNAMES=t-0,t-1,t-2,t-3 TPU_WORKER_ID=3")
TWO_SLICES = env(
    "TPU_WORKER_HOSTNAMES=t-0,t-1 TPU_WORKER_ID=1 MEGASCALE_NUM_SLICES=2 MEGASCALE_SLICE_ID=1 "
    "MEGASCALE_COORDINATOR_ADDRESS=u-0:8080"
)
FIRST = env("OMPI_COMM_WORLD_RANK=0")
SEVERAL = env("OMPI_COMM_WORLD_LOCAL_SIZE=4")
ADDRESS = env("JAX_COORDINATOR_ADDRESS=z:9")
ELASTIC = env("TORCHELASTIC_RUN_ID=x TORCHELASTIC_RESTART_COUNT=1")


def resolve(environ):
    return resolve_identity(environ, is_interactive=False)


@pytest.fixture(autouse=True)
def pod(monkeypatch):
    """This host is the last pod of an Indexed Job."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "job-3.pods.space.svc.cluster.local")


@pytest.mark.parametrize(
    "environ, coordinator, source",
    [
        (LAUNCHED, "a:1", "jddp.launch"),
        (STEP | OPEN_MPI_5 | TORCHRUN | LAUNCHED, "a:1", "jddp.launch"),
        (STEP | OPEN_MPI_5 | TORCHRUN | JAX, "a:1", "JAX_NUM_PROCESSES"),
        (STEP | OPEN_MPI_5 | TORCHRUN, "b:29500", "torchrun"),
        (JAX, "a:1", "JAX_NUM_PROCESSES"),
        (JAX | V6, "[fe80::1]:65535", "JAX_NUM_PROCESSES"),
        (TORCHRUN, "b:29500", "torchrun"),
        *(
            (TORCHRUN | env(f"MASTER_ADDR={x}"), "[::1]:29500", "torchrun")
            for x in ("::1", "[::1]")
        ),
        (TORCHRUN | ELASTIC, f"b:{port_of('29500/x/1')}", "torchrun"),
        (OPEN_MPI_4, f"10.0.0.1:{port_of('1531576320')}", "Open MPI"),
        (OPEN_MPI_4 | SEVERAL, f"127.0.0.1:{port_of('1531576320')}", "Open MPI"),
        (OPEN_MPI_5, f"login-1:{port_of('prterun-login-1-4242@1')}", "Open MPI"),
        (OPEN_MPI_5 | STEP, f"n1:{port_of('7.')}", "Open MPI"),  # its daemons are a step
        (OPEN_MPI | ADDRESS, "z:9", "Open MPI"),
        (MPICH | ADDRESS, "z:9", "MPICH"),
        (MPICH | ALLOCATION, f"n1:{port_of('7.')}", "MPICH"),
        (STEP, f"n2:{port_of('7.0')}", "Slurm"),
        (STEP | {"PMI_SIZE": "4", "PMI_RANK": "3"}, f"n2:{port_of('7.0')}", "Slurm"),
        (STEP | ADDRESS, "z:9", "Slurm"),
        (STEP | MASTER, f"n2:{port_of('7.0')}", "Slurm"),  # as scripts of torch set for all tasks
        (INDEXED, "job-0.pods.space.svc.cluster.local:8476", "an Indexed Job"),
        (INDEXED | ADDRESS, "z:9", "an Indexed Job"),
        (TPU_HOSTS, "t-0:8482", "a slice of TPUs"),
        (TWO_SLICES, "u-0:8482", "a slice of TPUs"),
    ],
)
def test_each_source_gives_number_and_coordinator(environ, coordinator, source):
    start = f"4 processes, set by {source}; process 3; coordinator {coordinator}; "
    assert str(resolve(environ)).startswith(start)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        dict.fromkeys(JAX, ""),
        env("SLURM_PROCID=1"),
        ALLOCATION,
        BATCH,
        STEP | env("SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0"),
        TORCHRUN | env("WORLD_SIZE=1 RANK=0"),
        env("MASTER_ADDR=b MASTER_PORT=1"),
        env("RANK=0 WORLD_SIZE=1"),  # of containers, which give no address
        env("JAX_NUM_PROCESSES=1 JAX_PROCESS_ID=0"),
        OPEN_MPI_5 | env("OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0"),
        MPICH | env("PMI_SIZE=1 PMI_RANK=0"),
        env("JOB_COMPLETION_INDEX=3"),  # an array of jobs
        env("TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0"),
    ],
)
def test_one_task_is_alone_whatever_is_around_it(environ):
    assert resolve(environ) == Identity()
    assert explain_unjoined(environ) is None


def test_a_notebook_and_a_shell_of_srun_ask_no_scheduler_and_tasks_the_shell_starts_do(monkeypatch):
    for environ in (STEP, OPEN_MPI_5, MPICH):
        assert resolve_identity(environ, is_interactive=True) == Identity()
    assert resolve_identity(JAX, is_interactive=True).num_processes == 4
    shell = STEP | {"SLURM_PTY_PORT": "1"}
    monkeypatch.setattr("os.isatty", lambda _: True)
    assert resolve_identity(shell) == Identity()
    monkeypatch.setattr("os.isatty", lambda _: False)
    assert resolve_identity(shell).num_processes == 4


FIRST_HOSTS = {"n1,n2": "n1", "n[9-10],m1": "n9", "gpu-a.b.c": "gpu-a.b.c"}
FIRST_HOSTS |= {"node-[003-004,12],m1": "node-003", "a[1-2]b[07-08].c": "a1b07.c"}


def test_the_first_host_of_a_list_is_found():
    assert {nodes: first_host(nodes) for nodes in FIRST_HOSTS} == FIRST_HOSTS


def test_jobs_and_steps_have_ports_of_their_own_which_linux_does_not_hand_out():
    ports = [resolve(STEP | {"SLURM_STEP_ID": str(step)}).coordinator for step in range(20)]
    ports += [resolve(STEP | {"SLURM_JOB_ID": str(job)}).coordinator for job in range(8, 28)]
    assert len(set(ports)) >= 39
    assert all(FIRST_PORT <= port_of(str(job)) < FIRST_PORT + NUM_PORTS for job in range(1000))
    assert FIRST_PORT + NUM_PORTS == 2**16


GPUS = env("CUDA_VISIBLE_DEVICES=0,1,2,3")


@pytest.mark.parametrize(
    "environ, ids",
    [
        (STEP, (1,)),
        (TORCHRUN, (1,)),
        (OPEN_MPI_5, (1,)),
        (MPICH | ADDRESS, (1,)),
        (STEP | GPUS, (2, 3)),  # two tasks on this host share four
        (STEP | {"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        (STEP | {"CUDA_VISIBLE_DEVICES": "2"}, None),  # cut already
        (STEP | GPUS | {"SLURM_GPUS_ON_NODE": "4"}, (2, 3)),
        (STEP | GPUS | {"SLURM_GPUS_ON_NODE": "8"}, None),  # --gpus-per-task=4
        (OPEN_MPI_5 | GPUS | {"SLURM_GPUS_ON_NODE": "8"}, (2, 3)),
        (STEP | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
        (STEP | GPUS | {"JAX_PLATFORMS": "cpu"}, None),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}, None),
        (STEP | env("ROCR_VISIBLE_DEVICES=0"), None),  # AMD's
        (STEP | env("ROCR_VISIBLE_DEVICES=0,1,2,3"), (2, 3)),
        (STEP | env("ROCR_VISIBLE_DEVICES=0,1,2,3 HIP_VISIBLE_DEVICES=0,1"), (1,)),
        (JAX, None),
        (INDEXED, None),
    ],
)
def test_processes_of_a_host_share_its_devices(environ, ids):
    identity = resolve(environ)
    assert identity.local_device_ids == ids
    numbers = ", ".join(map(str, ids or ()))
    assert str(identity).endswith(f"; local devices {numbers}" if ids else "; every local device")


FOUR_SHARE_TWO = env("SLURM_STEP_TASKS_PER_NODE=4(x2)")
GIVES_NOT = "does not give the address of process 0: set JAX_COORDINATOR_ADDRESS"
MISTAKES = [
    *((JAX | env(f"{name}="), f"set but {name} not") for name in JAX),
    ({name: JAX[name] for name in list(JAX)[:2]}, "set but JAX_PROCESS_ID not"),
    *((JAX | env(f"JAX_PROCESS_ID={x}"), f"JAX_PROCESS_ID='{x}'") for x in ("two", "-1")),
    (JAX | {"JAX_PROCESS_ID": "9" * 5000}, r"JAX_PROCESS_ID='9{57}\.\.\.'"),
    *((JAX | env(f"JAX_NUM_PROCESSES={x}"), f"NUM_PROCESSES='{x}'") for x in ("1.5", 10**9)),
    (JAX | env("JAX_PROCESS_ID=4"), "4 must be below .*4"),
    *(
        (JAX | env(f"JAX_COORDINATOR_ADDRESS={x}"), f"JAX_COORDINATOR_ADDRESS='{x}' must be host:")
        for x in ("node-0", ":1234", "node-0:", "node-0:http", "node-0:70000", "a..b:1")
    ),
    (STEP | env("SLURM_PROCID=4"), "SLURM_PROCID=4 must be below SLURM_STEP_NUM_TASKS=4"),
    (STEP | env("SLURM_PROCID="), "SLURM_PROCID not"),
    (
        STEP | FOUR_SHARE_TWO | env("CUDA_VISIBLE_DEVICES=0,1"),
        "PER_NODE=4 .*CUDA_VISIBLE_DEVICES=0,1",
    ),
    (TORCHRUN | env("RANK=7"), "RANK=7 must be below WORLD_SIZE=4"),
    (TORCHRUN | env("MASTER_PORT=http"), "MASTER_ADDR:MASTER_PORT='b:http' must be host:port"),
    (env("RANK=1"), "RANK set but MASTER_ADDR, MASTER_PORT, WORLD_SIZE not"),
    (OPEN_MPI, f"Open MPI {GIVES_NOT}"),
    (OPEN_MPI_5 | FIRST | env("PMIX_HOSTNAME=n2"), r"mpirun -x JAX_.*=n2:6\d{4},"),
    (MPICH, f"MPICH {GIVES_NOT}"),
    (INDEXED | env("JAX_NUM_PROCESSES=3"), "JOB_COMPLETION_INDEX=3 must be below"),
    (BATCH | env("JAX_NUM_PROCESSES=4"), "JAX_NUM_PROCESSES set but JAX_COORDINATOR_ADDRESS"),
]


@pytest.mark.parametrize("environ, reported", MISTAKES)
def test_a_mistake_is_one_line_that_names_variables_and_values(environ, reported):
    with pytest.raises(ConfigError, match=reported) as caught:
        resolve(environ)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_pod_finds_the_first_by_its_name_or_asks_for_an_address(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "mine-workers-0-3.mine.space")
    assert resolve(INDEXED) == Identity("mine-workers-0-0.mine.space:8476", 4, 3)
    for name in ("job-3", "job-2.pods"):  # of no domain, and of another pod
        monkeypatch.setattr(socket, "getfqdn", lambda name=name: name)
        with pytest.raises(ConfigError, match=GIVES_NOT):
            resolve(INDEXED)


# A process that its launcher started as one of several is not to train by itself.


@pytest.mark.parametrize(
    "environ, count_in",
    [
        (LAUNCHED, "JAX_NUM_PROCESSES"),
        (TORCHRUN, "WORLD_SIZE"),
        (env("RANK=3 WORLD_SIZE=4"), "WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),  # which gives no address
        (MPICH, "PMI_SIZE"),
        (STEP, "SLURM_STEP_NUM_TASKS"),
        (INDEXED, "JAX_NUM_PROCESSES"),
        (env("RANK=0 WORLD_SIZE=1") | OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_the_numbers_of_a_launcher_describe_its_job_with_or_without_an_address(environ, count_in):
    for given in (environ, environ | ADDRESS):
        what, way_out = explain_unjoined(given)
        assert what.startswith(f"{count_in}=4: a launcher has started 4 processes")
        assert "this is number 3" in what
        assert "`distributed.initialize(distributed.resolve_identity())`" in way_out
        assert way_out.endswith(f"To train by itself on purpose, unset {count_in}.")
        assert explain_unjoined({k: x for k, x in given.items() if k != count_in}) is None


@pytest.mark.parametrize(
    "environ",
    [env("RANK=3"), MASTER, ADDRESS, STEP | env("SLURM_PTY_PORT=1 SLURM_PROCID=x"), FIRST],
)
def test_variables_that_make_no_sense_describe_no_job(environ):
    assert explain_unjoined(environ) is None


def test_the_class_fit_and_the_doctor_refuse_one_process_of_several(monkeypatch, tmp_path):
    ddp = jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn, mesh=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    jddp.fit(ddp, [make_batch(4)], num_steps=1)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    refused = "JAX_NUM_PROCESSES=4: a launcher has started 4 processes"
    with pytest.raises(UsageError, match=refused):
        jddp.DataParallel(MLP(), optax.sgd(0.1), loss_fn)
    with pytest.raises(UsageError, match=refused):
        jddp.fit(ddp, [make_batch(4)], num_steps=1, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (finding,) = check_job(tmp_path)
    assert finding.level == "bad"
    assert finding.what.startswith(refused)
    assert "from jddp import distributed" in finding.fix


def test_a_host_of_cloud_tpus_asks_the_metadata_server_for_its_number_and_all_hosts(tmp_path):
    answers = {"curl": 'case "$*" in *number) echo 1;; *) echo x:0:10.0.0.1,10.0.0.2;; esac'}
    answers["python"] = 'echo "$TPU_WORKER_ID $TPU_WORKER_HOSTNAMES $*"'
    for name, line in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(__file__).parents[2] / "scripts" / "tpu_vm.sh"
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    printed = subprocess.run([script, "a=1"], env=path, capture_output=True, text=True, check=True)
    assert printed.stdout == "1 10.0.0.1,10.0.0.2 -m jddp.train a=1\n"
