"""A user's folder whose jobs run on many hosts, and the runs they are held against."""

import contextlib

import pytest
from faults.jobs import make_folder
from test_launch import FEW, result, train

from clusters.hosts import Hosts
from clusters.launching import LONGER, two_launchers


@pytest.fixture(scope="session")
def jobs(tmp_path_factory, request):
    """The folder."""
    return make_folder(tmp_path_factory.mktemp("jobs"), request.config.cache.mkdir("jobs"))


@pytest.fixture(scope="session")
def one(jobs):
    """What one process of four devices has measured in a few steps."""
    done = train(jobs, "--num-processes", 1, "--devices-per-process", 4, run="one", arguments=FEW)
    assert done.code == 0, done.err
    return result(jobs, "one")[0]


@pytest.fixture(scope="session")
def golden(jobs, tmp_path_factory):
    """The result of a run of four processes on two hosts, which nothing has disturbed."""
    folder = tmp_path_factory.mktemp("golden")
    with Hosts(folder, "h1", "h2") as hosts, contextlib.ExitStack() as stack:
        nodes = two_launchers(hosts, jobs, "golden", *LONGER)
        nodes = [stack.enter_context(node()) for node in nodes]
        assert [node.end() for node in nodes] == [0, 0], [node.err for node in nodes]
    return result(jobs, "golden")
