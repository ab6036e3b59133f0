"""Devices in a row, and what lies on them: a digest tells any two arrays apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jddp.distributed.join import configure_devices
from jddp.engine.digest import as_words, digests, find_divergence
from jddp.engine.mesh import make_mesh, sharded
from jddp.ground.errors import ConfigError, UsageError
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


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64"]
DTYPES += ["int4", "float4_e2m1fn"]
EVERYWHERE = P()


def put(x, num_devices=2, spec=EVERYWHERE):
    return jax.device_put(x, jax.NamedSharding(make_mesh(num_devices), spec))


def word(x, **where):
    tree = {"x": put(x, **where)}
    (found,) = as_words(digests(tree), tree)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (8,), (4, 3), (2, 2, 3)])
def test_one_changed_element_always_shows(dtype, shape):
    zeros = np.zeros(shape, jnp.dtype(dtype))
    found = {word(zeros)}
    for place in range(zeros.size):
        changed = zeros.copy()
        changed.flat[place] = 1
        found.add(word(changed))
    assert len(found) == 1 + zeros.size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_zeros_and_numbers_that_are_none_are_told_apart_by_their_bits(dtype):
    values = np.array([0.0, -0.0, np.nan, -np.nan, np.inf], jnp.dtype(dtype))
    assert len({word(values[i : i + 1]) for i in range(5)}) == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_has_one_digest_on_any_devices_whole_or_split(dtype):
    x = np.random.default_rng(0).integers(0, 2, (16, 3)).astype(jnp.dtype(dtype))
    whole = {word(x, num_devices=n) for n in (1, 2, 8)}
    parts = {word(x, num_devices=n, spec=P("data")) for n in (1, 2, 8)}
    assert len(whole | parts) == 1


def test_keys_and_no_elements_have_a_digest_too_and_arrays_whose_memory_is_gone_are_refused():
    keys = [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]
    assert len({word(key) for key in keys}) == 3
    assert word(jax.random.split(keys[0], 8), spec=P("data")) == word(jax.random.split(keys[0], 8))
    assert word(np.zeros((0, 3), np.float32)) == "00000000"
    x = put(np.ones(2))
    x.delete()
    with pytest.raises(UsageError, match="was given to a step"):
        digests({"x": x})


def test_replicas_that_differ_in_one_bit_have_other_rows():
    mesh = make_mesh(4)
    copies = [np.ones((3, 2), np.float32) for _ in range(4)]
    copies[2][1, 1] = np.nextafter(np.float32(1), np.float32(2))
    arrays = [jax.device_put(c, d) for c, d in zip(copies, mesh.devices, strict=True)]
    x = jax.make_array_from_single_device_arrays((3, 2), jax.NamedSharding(mesh, P()), arrays)
    tree = {"same": put(np.ones(2), 4), "differs": x}
    found = np.asarray(digests(tree))
    assert found.shape == (4, 2)
    assert find_divergence(found, tree) == "differs differs on replica 2 (process 0)"
    assert find_divergence(found[:2], tree) is None
    differs, same = found[:, 0], found[:, 1]  # in the tree's order
    assert (same == same[0]).all()
    assert (differs != differs[0]).tolist() == [False, False, True, False]


def test_small_arrays_that_are_alike_are_digested_at_once_each_as_if_alone():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in [(), (4, 3), ()] * 5]
    arrays += [rng.normal(size=(4, 3)).astype("bfloat16"), np.zeros(2**15, np.float32)]
    tree = [put(x) for x in arrays] + [put(x, spec=P("data")) for x in arrays[1:2] * 2]
    assert as_words(digests(tree), tree) == [word(x) for x in [*arrays, arrays[1], arrays[1]]]
