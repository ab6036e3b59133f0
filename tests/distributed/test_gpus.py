"""What a host shows of GPUs: what is missing where JAX has none, and what they, or CPUs, need."""

import jax
import pytest

from jddp.distributed import gpus, join
from jddp.distributed.gpus import FLAG, add_flag, gpu_facts, lacks_atomics, why_missing
from jddp.ground.errors import DeviceError

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.54.14  Thu"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes a host: its driver, its numbers of GPUs, and the plugins that are installed."""
    monkeypatch.setattr(gpus, "ROOT", tmp_path)

    def make(*, driver=None, nvidia=0, plugins=()):
        names = [f"dev/nvidia{i}" for i in range(nvidia)] + ["dev/nvidiactl"] * (nvidia > 0)
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        if driver:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
            (tmp_path / "proc/driver/nvidia/version").write_text(VERSION.format(driver))
        monkeypatch.setattr(gpus, "plugins", lambda: list(plugins))

    return make


@pytest.mark.parametrize(
    "there, words",
    [
        ({}, None),
        ({"plugins": ["rocm7"]}, ["rocm7", "no driver"]),
        ({"plugins": ["cuda12"]}, ["cuda12", "no driver", "--gpus all"]),
        ({"driver": 550, "plugins": ["cuda12"]}, ["no /dev/nvidia*", "--gpus all"]),
        ({"driver": 580, "nvidia": 1}, ["no plugin", "pip install 'jddp[cuda12]'"]),
        ({"driver": 550, "nvidia": 1, "plugins": ["cuda13"]}, ["needs 580", "or jddp[cuda12]"]),
        ({"driver": 470, "nvidia": 1, "plugins": ["cuda12"]}, ["needs 525", "newer driver."]),
        ({"driver": 550, "nvidia": 1, "plugins": ["cuda12"]}, ["cuda12 finds no GPU."]),
    ],
)
def test_what_is_missing_is_named_with_a_way_out(host, there, words):
    host(**there)
    found = why_missing()
    assert (found is None) == (words is None)
    assert all(word in str(found) for word in words or ())
    assert "\n" not in str(found)


def test_a_process_has_a_gpu_where_there_is_a_file_and_the_platforms_allow_it(host):
    host()
    assert gpu_facts({}) == {"a GPU": "absent"}
    host(nvidia=2)
    for platforms, is_there in (("", True), ("cuda", True), ("cuda,cpu", True), ("cpu", False)):
        want = "present" if is_there else "absent"
        assert gpu_facts({"JAX_PLATFORMS": platforms}) == {"a GPU": want}


def test_a_platform_without_a_device_is_one_line_that_names_what_is_missing(host, monkeypatch):
    def no_device():
        raise RuntimeError("Unable to load CUDA. Is it installed?\nmore")

    host(driver=550, plugins=["cuda12"])
    monkeypatch.setattr(jax, "local_devices", no_device)
    monkeypatch.setattr(join, "may_use_gpus", lambda wanted: True)
    with pytest.raises(DeviceError, match=r"CUDA. Is it installed\. NVIDIA's driver is 550, but"):
        join.require_devices()


def test_cpus_are_reported_where_a_gpu_was_expected_and_cpus_were_not_chosen(host, monkeypatch):
    host(plugins=["cuda12"])
    assert join.require_devices() is None  # JAX_PLATFORMS=cpu
    monkeypatch.setattr(join, "may_use_gpus", lambda wanted: True)
    assert "plugin cuda12 is installed" in str(join.require_devices())
    host(plugins=[])
    assert join.require_devices() is None


def test_cpus_are_refused_where_a_tpu_was_to_be_expected(host, monkeypatch):
    host(plugins=[])
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    assert join.require_devices() is None  # JAX_PLATFORMS=cpu
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(DeviceError, match=r"jddp\[tpu\]"):
            join.require_devices()
    finally:
        jax.config.update("jax_platforms", "cpu")


@pytest.mark.parametrize(
    "jaxlib, environ, num_gpus, flags",
    [
        ("0.10.1", {}, 1, None),
        ("0.10.2", {}, 1, FLAG),
        ("0.11.0", {"XLA_FLAGS": "--a=1"}, 1, f"--a=1 {FLAG}"),
        ("0.11.1", {}, 1, None),
        ("0.10.2", {}, 0, None),
        ("0.10.2", {"JAX_PLATFORMS": "cpu"}, 1, None),
        ("0.10.2", {"JAX_PLATFORMS": "cuda"}, 1, FLAG),
        ("0.10.2", {"XLA_FLAGS": f"{FLAG.split('=')[0]}=x"}, 1, f"{FLAG.split('=')[0]}=x"),
    ],
)
def test_the_flag_is_added_for_versions_that_need_it_unless_it_is_set(
    monkeypatch, jaxlib, environ, num_gpus, flags
):
    monkeypatch.setattr("importlib.metadata.version", lambda package: jaxlib)
    monkeypatch.setattr(gpus, "num_nvidia", lambda: num_gpus)
    add_flag(environ)
    assert environ.get("XLA_FLAGS") == flags
    assert not (flags and lacks_atomics(environ))
