"""Devices in a row, and what lies on them."""

import jax
import numpy as np
import pytest

from jddp.distributed.join import configure_devices
from jddp.engine.mesh import make_mesh, sharded
from jddp.ground.errors import ConfigError
from jddp.modules.rows import check_rows


@pytest.fixture
def configured(monkeypatch):
    """The number of CPU devices that JAX would be set to."""
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return set_to


def test_devices_are_counted_over_all_processes(configured):
    for given, num_processes, each in (("auto", 1, 8), ("auto", 2, 4), ("auto", 16, 1), (6, 3, 2)):
        configure_devices(given, num_processes=num_processes)
        assert configured == {"jax_num_cpu_devices": each}


FLAG = "--xla_force_host_platform_device_count=3"


@pytest.mark.parametrize("name, value", [("JAX_NUM_CPU_DEVICES", "3"), ("XLA_FLAGS", FLAG)])
def test_the_environment_wins_over_auto_and_a_number_over_the_environment(
    configured, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    configure_devices("auto")
    assert configured == {}
    configure_devices(2)
    assert configured == {"jax_num_cpu_devices": 2}


def test_what_does_not_divide_is_refused_with_the_nearest_that_does():
    with pytest.raises(ConfigError, match="num_devices=5 .* 2 processes.*multiple of 2"):
        configure_devices(5, num_processes=2)
    for num, near in ((0, "4"), (3, "4"), (5, "4 and 8"), (11, "8 and 12")):
        with pytest.raises(ConfigError, match=f"{num} rows do not divide over 4 devices.*: {near}"):
            check_rows(num, 4, "4 devices")


@pytest.mark.parametrize("devices", [None, 2, jax.devices()[2:5]], ids=["all", "two", "some"])
def test_a_mesh_has_one_axis_that_takes_host_arrays(devices):
    mesh = make_mesh(devices)
    assert mesh.axis_names == ("data",)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert make_mesh(mesh) == mesh
    named = make_mesh(devices, "batch")
    assert make_mesh(named) == named
    assert make_mesh(named, "rows").axis_names == ("rows",)
    assert sharded(named).spec == jax.P("batch")


def test_each_process_gives_the_same_number_of_devices(monkeypatch):
    by_process = np.reshape(jax.devices(), (2, 4)).tolist()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_devices", lambda process_index: by_process[process_index])
    assert list(make_mesh(4).devices) == [*by_process[0][:2], *by_process[1][:2]]
    for num in (1, 3, 10):
        with pytest.raises(ConfigError, match=f"mesh of {num} devices: .* multiple of 2 up to 8"):
            make_mesh(num)
