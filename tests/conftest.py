"""Tests run on eight virtual CPU devices; `JAX_PLATFORMS=cuda scripts/test -m gpu` on real ones."""

import gc
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's code generator for fusions takes three times as long to compile as the one before it, which
# JAX 0.12 no longer has. XLA_FLAGS=--xla_cpu_use_fusion_emitters=true runs what users run.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
        os.environ.get("XLA_FLAGS", ""),
    ]
)

import hypothesis
import jax
import numpy as np
import pytest

NUM_DEVICES = 8


# Tests send signals, which `nohup` and a shell's `&` leave ignored for whatever they start.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)

# A machine with other work is slow, which is no failure.
hypothesis.settings.register_profile(
    "jddp", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("jddp")

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # one source line for each operation
gc.set_threshold(100_000, 20, 100)  # Traces are many small objects, and JAX's caches keep them.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=[1, 8], ids="{}_replicas".format)
def mesh(request):
    """A mesh of 1 and of 8 replicas, along the axis "data"."""
    return jax.sharding.Mesh(np.array(jax.devices()[: request.param]), ("data",))


@pytest.fixture(scope="session")
def started_devices():
    """Starts the devices of the tests: a job that comes first would start those of its config."""
    return jax.devices()


@pytest.fixture(scope="module")
def as_users_compile():
    """Undoes what the other tests ask of JAX to compile fast."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture(autouse=True)
def process_is_not_owned():
    """Fails the test that leaves the process to a watchdog, which would end the others with it."""
    yield
    exits = sys.modules.get("jddp.distributed.exits")
    assert exits is None or not exits.process.is_owned


def compile_cache(config):
    """Where compiled programs are kept for later runs: of this user, in whatever checkout."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        (folder := caches / "jddp" / "tests").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return config.cache.mkdir("jax")
    return folder


def pytest_configure(config):
    if config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update("jax_compilation_cache_dir", str(compile_cache(config)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_collection_modifyitems(items):
    # The address of an object differs on each worker, and then none of them runs anything.
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not unstable, f"give these tests ids: {unstable}"
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
