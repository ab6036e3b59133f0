"""GPUs that are absent or shared are refused; a cache that is not shared is off."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest
from runs import run_job

from jddp.distributed import agree, gpus
from jddp.distributed.agree import choose, refuse_gpus, use_if_shared
from jddp.distributed.identity import Identity
from jddp.ground.errors import ConfigError

PLAIN = ["GPU-aa-1", "GPU-bb-2", "GPU-cc-3"]


@pytest.mark.parametrize(
    "visible, ids, listed, want",
    [
        (None, None, PLAIN, ["GPU-aa-1", "GPU-bb-2", "GPU-cc-3"]),
        (None, (1,), PLAIN, ["GPU-bb-2"]),
        ("2,0", None, PLAIN, ["GPU-cc-3", "GPU-aa-1"]),
        ("2,0", (1,), PLAIN, ["GPU-aa-1"]),
        ("GPU-bb", None, PLAIN, ["GPU-bb-2"]),  # the beginning is enough
        ("0,-1,1", None, PLAIN, ["GPU-aa-1"]),  # which hides the rest
        ("", None, PLAIN, []),
        ("0,1", None, [], []),  # without nvidia-smi
        (None, (1,), [], []),
        ("MIG-x", None, [], ["MIG-x"]),
    ],
)
def test_the_gpus_of_a_process_are_known_by_their_uuids(visible, ids, listed, want):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert choose(environ, ids, listed) == want


@pytest.mark.parametrize(
    "visible, ids, listed, reported",
    [
        ("4,5", None, PLAIN, "='4,5': 4 is none of the 3 GPUs"),
        ("0,GPU-dd-4", None, PLAIN, "GPU-dd-4 is none of the 3 GPUs"),
        ("cuda:0", None, PLAIN, "cuda:0 is none of the"),
        ("0", (1,), PLAIN, "local device 1 does not exist: this process sees 1 GPUs"),
        (None, (7,), PLAIN, "local device 7 does not exist: this process sees 3 GPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(visible, ids, listed, reported):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(ConfigError, match=reported) as caught:
        choose(environ, ids, listed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "of_processes, reported",
    [
        ([(["a"], ""), (["b"], "")], None),
        ([([], ""), ([], "")], None),  # nothing is known
        ([(["a", "b"], ""), (["b"], "")], "processes 0 and 1 have the same GPU, b"),
        ([(["a"], ""), ([], "there is no 4")], "process 1: there is no 4"),
        ([([], "there is no 4")], "^there is no 4"),
    ],
)
def test_what_nccl_would_not_connect_is_refused(monkeypatch, of_processes, reported):
    expected = pytest.raises(ConfigError, match=reported) if reported else nullcontext()
    monkeypatch.setattr(agree, "gather", lambda *_, **__: [*map(json.dumps, of_processes)])
    with expected:
        refuse_gpus(Identity(), {})


def test_nvidia_smi_is_asked_only_where_cuda_may_choose_other_gpus(monkeypatch):
    def never():
        raise AssertionError

    monkeypatch.setattr(agree, "plugins", lambda: ["cuda12"])
    monkeypatch.setattr(agree, "num_nvidia", lambda: 3)
    monkeypatch.setattr(agree, "list_gpus", never)
    refuse_gpus(Identity(), {})  # every GPU, for one process
    refuse_gpus(Identity(), {"CUDA_VISIBLE_DEVICES": "9", "JAX_PLATFORMS": "cpu"})
    listed = [gpus.Gpu(uuid, "", None, None) for uuid in PLAIN]
    monkeypatch.setattr(agree, "list_gpus", lambda: listed)
    with pytest.raises(ConfigError, match="9 is none of the 3 GPUs"):
        refuse_gpus(Identity(), {"CUDA_VISIBLE_DEVICES": "9"})
    monkeypatch.setattr(agree, "list_gpus", list)  # there is no such program
    refuse_gpus(Identity(), {"CUDA_VISIBLE_DEVICES": "9"})


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The cache of this process, which was on before and is again afterwards."""
    folder, before = tmp_path / "cache", jax.config.jax_enable_compilation_cache
    monkeypatch.setattr(agree, "_LATE_SECONDS", 0.0)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", before)


def settle(monkeypatch, *others):
    """Runs the exchange of process 0; the others see its file, or report as given."""
    seen = []

    def gather(key, value, **_):
        seen.append(value)
        return [value, *(others or [value])]

    monkeypatch.setattr(agree, "gather", gather)
    use_if_shared()
    assert len(seen) == 1
    return seen[0]


@pytest.mark.parametrize("others", [[], ["not seen"], ["no cache"]])
def test_a_folder_is_used_if_all_see_it_and_left_as_it_was(here, monkeypatch, capsys, others):
    assert settle(monkeypatch, *others) == "seen"
    assert jax.config.jax_enable_compilation_cache == (not others)
    assert not any(here.iterdir())
    said = capsys.readouterr().err
    assert said.count("\n") == len(others)
    assert not others or (f"1 of 2 processes do not see the files of process 0 in {here}" in said)


@pytest.mark.parametrize(
    "first, seen", [("gs://a/b", "seen"), ("gs://a/c", "not seen"), ("", "not seen")]
)
def test_a_url_is_shared_by_those_that_name_the_same(here, monkeypatch, first, seen):
    jax.config.update("jax_compilation_cache_dir", "gs://a/b")
    monkeypatch.setattr(agree, "process_index", lambda: 1)
    monkeypatch.setattr(agree, "from_first", lambda *_, **__: json.dumps([first, ""]))
    assert settle(monkeypatch) == seen


def test_a_folder_that_cannot_be_written_is_used_by_none_and_no_cache_is_not_mentioned(
    here, monkeypatch, capsys
):
    jax.config.update("jax_enable_compilation_cache", False)
    assert settle(monkeypatch) == "no cache"
    assert not here.exists()
    assert capsys.readouterr().err == ""
    jax.config.update("jax_enable_compilation_cache", True)
    here.write_text("a file in its place")
    assert settle(monkeypatch) == "not seen"
    assert not jax.config.jax_enable_compilation_cache


SCRIPT = """
from jddp.distributed import initialize, resolve_identity

initialize(resolve_identity())

import jax

assert jax.jit(lambda x: x + 1)(1) == 2
print(jax.config.jax_enable_compilation_cache)
"""


@pytest.mark.processes
@pytest.mark.parametrize("is_shared", [True, False])
def test_two_processes_use_one_folder_and_none_of_two(tmp_path, is_shared):
    every = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    folders = [str(tmp_path / str(0 if is_shared else number)) for number in range(2)]
    of_processes = [{**every, "JAX_COMPILATION_CACHE_DIR": folder} for folder in folders]
    ends = run_job([sys.executable, "-c", SCRIPT], *of_processes)
    assert [said for said, _ in ends] == [f"{is_shared}\n"] * 2
    lines = [line for _, errors in ends for line in errors.splitlines() if "is off" in line]
    assert len(lines) == (0 if is_shared else 1)
    assert all("1 of 2 processes" in line and "XDG_CACHE_HOME" in line for line in lines)
    entries = [name for _, _, names in os.walk(Path(tmp_path)) for name in names]
    assert bool(entries) == is_shared
    assert not [name for name in entries if name.startswith(".jddp")]
