"""Who am I among the processes: three variables, all or none."""

import jax
import pytest

from jddp.cluster import VARIABLES, Identity, initialize, resolve_identity
from jddp.errors import ConfigError

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
