"""Every test runs on eight virtual CPU devices, with no rank promotion and no warning.

`JAX_PLATFORMS=cuda scripts/test -m gpu` runs the tests of real devices instead.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

NUM_DEVICES = 8

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
# Tests compile much and compute little.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=[1, 2, 8], ids="{}_replicas".format)
def mesh(request):
    """A mesh of 1, 2 and 8 replicas, along the axis "data"."""
    return jax.sharding.Mesh(np.array(jax.devices()[: request.param]), ("data",))


def pytest_configure(config):
    if config.pluginmanager.hasplugin("cacheprovider"):
        # What one run has compiled, the next need not.
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))


def refuse_skip(report):
    # What CI does not have, it does not test: there a skip is a failure that nobody sees.
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if not item.get_closest_marker("gpu"):
        refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    refuse_skip(report)
    return report
