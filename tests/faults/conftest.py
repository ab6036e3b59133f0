"""Runs that nothing disturbed, which the disturbed ones are held against."""

import pytest

from faults.jobs import Job, make_folder


@pytest.fixture(scope="session")
def cache(request):
    """Where jobs keep what they have compiled, from one run of the tests to the next."""
    return request.config.cache.mkdir("jobs")


@pytest.fixture(scope="session")
def golden(tmp_path_factory, cache):
    """`golden(arguments, num_processes)` is such a run; each is made once."""
    folder, runs = make_folder(tmp_path_factory.mktemp("golden"), cache), {}

    def run(*arguments, num_processes=1):
        key = (arguments, num_processes)
        if key not in runs:
            with Job(
                folder, *arguments, f"run.dir=run-{len(runs)}", num_processes=num_processes
            ) as job:
                assert job.codes() == [0] * num_processes, job.outputs
            runs[key] = job
        return runs[key]

    return run


@pytest.fixture
def folder(tmp_path, cache):
    """A user's folder."""
    return make_folder(tmp_path / "user", cache)
