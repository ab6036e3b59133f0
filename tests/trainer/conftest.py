"""One small `DataParallel` for the tests of runs."""

import pytest
from tiny import wrapped


@pytest.fixture(scope="session")
def plain():
    return wrapped()
