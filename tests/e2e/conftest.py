"""Folders for jobs, and runs that nothing disturbed, which the disturbed ones are held against."""

import pytest
from faults.jobs import FEW, assert_ends, make_folder
from runs import records


@pytest.fixture(scope="session")
def cache(request):
    """Where jobs keep what they have compiled, from one run of the tests to the next."""
    return request.config.cache.mkdir("jobs")


@pytest.fixture
def folder(tmp_path, cache):
    """A user's folder."""
    return make_folder(tmp_path / "user", cache)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, cache):
    """A user's folder for all tests of a module."""
    return make_folder(tmp_path_factory.mktemp("jobs"), cache)


@pytest.fixture(scope="session")
def golden(tmp_path_factory, cache):
    """`golden(arguments, num_processes)` is such a run; each is made once."""
    folder, runs = make_folder(tmp_path_factory.mktemp("golden"), cache), {}

    def run(*arguments, num_processes=1):
        key = (arguments, num_processes)
        if key not in runs:
            mine = (*arguments, f"run.dir=run-{len(runs)}")
            runs[key] = assert_ends(folder, *mine, num_processes=num_processes)
        return runs[key]

    return run


@pytest.fixture(scope="session")
def one(golden):
    """The records of one process of four devices, of a few steps."""
    return records(golden(*FEW, "mesh.num_devices=4").run_dir)
