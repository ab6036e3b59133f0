"""A cache of programs that not all processes share is off."""

import jax
import pytest

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
