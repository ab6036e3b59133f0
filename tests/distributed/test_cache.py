"""A cache of programs that not all processes share is off."""

import os
import sys
from pathlib import Path

import jax
import pytest
from runs import run_job

from jddp.distributed import coordination
from jddp.distributed.join import use_if_shared


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The cache of this process, which was on before and is again afterwards."""
    folder, before = tmp_path / "cache", jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", before)


def settle(monkeypatch, *others):
    """Runs the exchange of process 0; returns whether it sees its own file."""
    seen = []

    def gather(key, value, **_):
        seen.append(value)
        return [value, *others]

    monkeypatch.setattr(coordination, "gather", gather)
    use_if_shared()
    return seen == ["True"]


@pytest.mark.parametrize("others", [[], ["True"], ["False"]])
def test_a_folder_is_used_if_all_see_it_and_left_as_it_was(here, monkeypatch, capsys, others):
    assert settle(monkeypatch, *others)
    is_off = others == ["False"]
    assert jax.config.jax_enable_compilation_cache == (not is_off)
    assert not any(here.iterdir())
    assert ("1 of 2 processes do not see" in capsys.readouterr().err) == is_off


@pytest.mark.parametrize("first, sees", [("gs://a/b", True), ("gs://a/c", False), ("", False)])
def test_a_url_is_shared_by_those_that_name_the_same(here, monkeypatch, first, sees):
    jax.config.update("jax_compilation_cache_dir", "gs://a/b")
    monkeypatch.setattr(coordination, "from_first", lambda *_, **__: first)
    assert settle(monkeypatch) == sees


def test_a_folder_that_cannot_be_written_is_used_by_none_and_no_cache_is_not_mentioned(
    here, monkeypatch, capsys
):
    jax.config.update("jax_enable_compilation_cache", False)
    assert settle(monkeypatch)
    assert not here.exists()
    assert capsys.readouterr().err == ""
    jax.config.update("jax_enable_compilation_cache", True)
    here.write_text("a file in its place")
    assert not settle(monkeypatch)
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
