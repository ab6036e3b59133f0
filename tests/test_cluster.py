"""Who am I among the processes: three variables, all or none."""

import os
import signal
import socket
import subprocess
import sys

import jax
import pytest

from jddp import cluster
from jddp.cluster import VARIABLES, Identity, initialize, resolve_identity
from jddp.errors import ConfigError, CoordinatorError

JOB = dict(zip(VARIABLES, ("node-0:1234", "4", "3"), strict=True))


@pytest.mark.parametrize("environ", [{}, dict.fromkeys(VARIABLES, ""), {"SLURM_PROCID": "1"}])
def test_a_process_that_is_told_nothing_is_alone(environ):
    assert resolve_identity(environ) == Identity(None, 1, 0)


@pytest.mark.parametrize("address", ["node-0:1234", "10.0.0.1:65535", "[fe80::1]:1"])
@pytest.mark.parametrize("numbers", [(4, 3), (4, 0), (1, 0)])
def test_a_process_of_a_job_is_told_all_three(address, numbers):
    environ = dict(zip(VARIABLES, (address, *map(str, numbers)), strict=True))
    assert resolve_identity(environ) == Identity(address, *numbers)


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_part_of_the_three_is_refused_with_the_one_that_is_missing(missing):
    told = {name: value for name, value in JOB.items() if name != missing}
    for environ in (told, {**told, missing: ""}):
        with pytest.raises(ConfigError, match=f"set but {missing} not"):
            resolve_identity(environ)


@pytest.mark.parametrize("name, other", [VARIABLES[1:], VARIABLES[:0:-1]])
@pytest.mark.parametrize("value", ["two", "1.5", "-1"])
def test_counts_that_are_no_whole_numbers_are_refused(name, other, value):
    with pytest.raises(ConfigError, match=f"{name}='{value}'.* must be numbers") as caught:
        resolve_identity({**JOB, name: value})
    assert other in str(caught.value)


@pytest.mark.parametrize("num_processes, process_id", [("4", "4"), ("2", "7"), ("0", "0")])
def test_a_process_beyond_the_number_of_processes_is_refused(num_processes, process_id):
    environ = dict(zip(VARIABLES, ("node-0:1234", num_processes, process_id), strict=True))
    with pytest.raises(ConfigError, match=f"{process_id} must be below .*{num_processes}"):
        resolve_identity(environ)


@pytest.mark.parametrize("address", ["node-0", ":1234", "node-0:", "node-0:http", "node-0:70000"])
def test_an_address_without_a_host_or_a_port_is_refused(address):
    with pytest.raises(
        ConfigError, match=f"{VARIABLES[0]}='{address}' must be host:port"
    ) as caught:
        resolve_identity({**JOB, VARIABLES[0]: address})
    assert caught.value.exit_code == 2


def test_the_environment_is_where_a_process_is_told(monkeypatch):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert resolve_identity() == Identity("node-0:1234", 4, 3)


@pytest.fixture
def joined(monkeypatch):
    """What `jax.distributed.initialize` was called with."""
    calls = []
    monkeypatch.setattr(cluster, "reach", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    return calls


def test_a_process_of_a_job_joins_it_with_nothing_left_to_detection(joined, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # as in a notebook inside an allocation
    initialize(resolve_identity(JOB))
    assert joined == [
        {
            "coordinator_address": "node-0:1234",
            "num_processes": 4,
            "process_id": 3,
            "local_device_ids": None,
            "cluster_detection_method": "deactivate",
            "initialization_timeout": 330,
            "coordinator_bind_address": None,  # which is the first process's affair
        }
    ]


@pytest.mark.parametrize(
    "environ, listens",
    [({}, "127.0.0.1:1234"), ({"JAX_COORDINATOR_BIND_ADDRESS": "[::]:99"}, "[::]:99")],
)
def test_the_first_process_listens_where_it_is_told_to(joined, environ, listens):
    initialize(Identity("127.0.0.1:1234", 2, 0), environ)
    assert joined[0]["coordinator_bind_address"] == listens


def test_a_process_that_is_alone_joins_nothing(joined):
    initialize(resolve_identity({}))
    assert joined == []


def test_a_job_that_the_user_has_joined_is_left_as_it_is(joined, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    initialize(resolve_identity(JOB))
    assert joined == []


def test_a_process_that_cannot_reach_the_first_says_where_it_has_tried(free_port):
    identity, environ = Identity(f"127.0.0.1:{free_port}", 2, 1), {"JDDP_START_SECONDS": "1"}
    told = f"process 1 of 2 cannot reach process 0 at 127.0.0.1:{free_port}: Connection refused, "
    with pytest.raises(CoordinatorError, match=told) as caught:
        initialize(identity, environ)
    assert caught.value.exit_code == 69


@pytest.fixture
def free_port():
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "1.5"])
def test_a_time_limit_that_is_no_number_is_refused(seconds):
    with pytest.raises(ConfigError, match=f"JDDP_START_SECONDS='{seconds}' must be a positive"):
        initialize(Identity("127.0.0.1:1", 2, 1), {"JDDP_START_SECONDS": seconds})


@pytest.mark.processes
def test_a_first_process_that_waits_in_vain_says_so(free_port):
    told = {**os.environ, "JDDP_START_SECONDS": "1"}
    told |= dict(zip(VARIABLES, (f"127.0.0.1:{free_port}", "2", "0"), strict=True))
    program = "from jddp.cluster import *; initialize(resolve_identity())"
    done = subprocess.run([sys.executable, "-c", program], env=told, capture_output=True, text=True)
    assert done.returncode == 69, done.stderr
    assert f"not all of 2 processes have come to 127.0.0.1:{free_port} within 1 s" in done.stderr
    assert "this is process 0." in done.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_of_one_number_do_not_train(free_port):
    job = {**os.environ, "JDDP_START_SECONDS": "5", "JAX_NUM_PROCESSES": "3"}
    job |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port}"}
    program = "from jddp.cluster import *; initialize(resolve_identity()); print('met')"
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env=job | {"JAX_PROCESS_ID": number}, **pipes)
        for number in ("0", "1", "1")
    ]
    said = [process.communicate(timeout=60) for process in processes]
    # JAX itself aborts the one that came first.
    assert sorted(process.returncode for process in processes) == [-signal.SIGABRT, 69, 69], said
    assert not any(out for out, _ in said)
    assert "not all of 3 processes have come" in said[0][1]
