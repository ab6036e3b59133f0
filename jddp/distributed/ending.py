"""The exit code with which this process ends, which Python does not pass to `atexit`.

    note_exits()          # once, early
    exit_code()           # in a function of `atexit`

The frame in which the program began is kept: if it has returned, the code is 0. If `sys.exit` has
ended it, the code is the argument of the last call. The code of a bare `raise SystemExit(3)` is not
known.
"""

import dis
import sys
import threading
from types import FrameType
from typing import NoReturn

_frame: FrameType | None = None
_last: list[object] = []  # of the last call of `sys.exit`


def note_exits() -> None:
    """From here on calls of `sys.exit` are noted."""
    global _frame
    if _frame is not None:
        return
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    _frame = frame
    leave = sys.exit

    def exit(status: str | int | None = None, /) -> NoReturn:
        _last[:] = [status]
        leave(status)

    sys.exit = exit


def exit_code() -> int | None:
    """The exit code of this process, which is ending; None if it is not known."""
    if _frame is None:
        return None
    if dis.opname[_frame.f_code.co_code[_frame.f_lasti]].startswith("RETURN"):
        return 0
    if not _last:
        return None
    (status,) = _last
    if status is None or isinstance(status, int):
        return (status or 0) % 256
    return 1  # Python prints anything else
