"""Huge pages are asked for where they help, and never over a user's setting."""

import pytest

from jddp.distributed import gpus
from jddp.distributed.gpus import huge_pages

SET = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.fixture(autouse=True)
def offered(monkeypatch, tmp_path):
    """A host without GPUs, whose kernel gives huge pages to programs that ask for them."""
    kernel = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("always [madvise] never\n")
    monkeypatch.setattr(gpus.os, "confstr", lambda name: "glibc 2.36")
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    return kernel


def test_they_are_asked_for_beside_other_tunables_and_once():
    assert huge_pages({}) == SET
    other = {"GLIBC_TUNABLES": "glibc.malloc.check=3"}
    both = {"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.hugetlb=1"}
    assert huge_pages(other) == both
    assert huge_pages(SET) == huge_pages(both) == {}
    assert huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}


@pytest.mark.parametrize("said", ["always madvise [never]", "[always] madvise never", None])
def test_nothing_is_asked_of_a_kernel_that_gives_them_to_all_or_to_none(offered, said):
    offered.write_text(said) if said else offered.unlink()
    assert huge_pages({}) == {}


@pytest.mark.parametrize("library", ["glibc 2.34", "musl 1.2", None])
def test_nothing_is_asked_of_a_library_without_the_tunable(monkeypatch, library):
    monkeypatch.setattr(gpus.os, "confstr", lambda name: library)
    assert huge_pages({}) == {}


def test_nothing_is_asked_where_arrays_are_on_a_gpu_unless_cpus_are_chosen(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert huge_pages({}) == {}
    assert huge_pages({"JAX_PLATFORMS": "cpu"}) == SET
