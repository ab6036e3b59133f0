"""Huge pages for arrays in the memory of CPUs: fewer page faults of fresh memory.

    environ |= huge_pages(environ)       # of a process that is to be started

glibc reads its tunables when a process starts, so nothing can be set later. Where the kernel gives
huge pages to programs that ask for them, and there is no GPU, a step that is bound by memory is
faster (benchmarks/README.md).
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from jddp.distributed import gpus

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OLDEST_GLIBC = (2, 35)  # that has the tunable


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that gives a process huge pages; {} where they are set or would not help.

    Args:
      environ: The other environment variables of the process.
    """
    before = environ.get(VARIABLE, "")
    if TUNABLE in before or gpus.has_gpu(environ) or not _are_offered():
        return {}
    return {VARIABLE: ":".join(filter(None, [before, f"{TUNABLE}=1"]))}


def _are_offered() -> bool:
    """Whether the C library asks for huge pages, and the kernel gives them to those that ask."""
    names = getattr(os, "confstr_names", {})
    library = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in names else None
    found = re.fullmatch(r"glibc (\d+)\.(\d+)", library or "")
    if found is None or (int(found[1]), int(found[2])) < OLDEST_GLIBC:
        return False
    return KERNEL.exists() and "[madvise]" in KERNEL.read_text()
