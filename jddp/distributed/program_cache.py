"""The persistent cache of compiled programs, whose folder all processes of a job have to share.

Every process reads the cache, and only process 0 writes it. If the others do not see its folder,
process 0 finds programs there at the next start that the others have to compile. XLA's autotuner on
GPUs divides its work over all processes: they would wait, up to a day, for one that does not
compile.
"""

import contextlib
import secrets
import time
from pathlib import Path

import jax

from jddp.distributed.coordination import from_first, gather, process_index
from jddp.errors import report

_IS_ON, _FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
_SECONDS = 60.0
_LATE_SECONDS = 2.0  # in which a file system shows what another host has written
_NONE, _SEEN, _UNSEEN = "no cache", "seen", "not seen"


def use_if_shared() -> None:
    """Switches the cache off unless all processes see a file that process 0 writes there.

    Every process of a job calls it, before it compiles anything.
    """
    place = (getattr(jax.config, _FOLDER) or "") if getattr(jax.config, _IS_ON) else ""
    is_first = process_index() == 0
    mark = _write_mark(place) if is_first else ""
    mark = from_first("cache/mark", mark, timeout_seconds=_SECONDS)
    seen = gather("cache/seen", _look_for(mark, place), timeout_seconds=_SECONDS)
    if is_first and place and mark != place:
        with contextlib.suppress(OSError):
            Path(place, mark).unlink()
    if set(seen) in ({_NONE}, {_SEEN}):
        return
    jax.config.update(_IS_ON, False)
    if is_first:
        blind = len(seen) - seen.count(_SEEN)
        where = place or "a cache that it does not have"
        report(
            f"the cache of compiled programs is off: {blind} of {len(seen)} processes do not see "
            f"the files of process 0 in {where}, and would wait for programs that it does not "
            "compile. Set XDG_CACHE_HOME to a directory that all of them share."
        )


def _write_mark(place: str) -> str:
    """Writes a file with a new name; returns this name, or the place if it is a URL."""
    if "://" in place or not place:
        return place
    name = f".jddp-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # then no process sees it
        Path(place).mkdir(parents=True, exist_ok=True)
        Path(place, name).touch()
    return name


def _look_for(mark: str, place: str) -> str:
    if not place:
        return _NONE
    until = time.monotonic() + _LATE_SECONDS
    while mark and mark != place and not Path(place, mark).exists():
        if time.monotonic() > until:
            return _UNSEEN
        time.sleep(0.05)
    return _SEEN if mark else _UNSEEN
