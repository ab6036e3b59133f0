"""Ends this process: the only `os._exit` of jddp, and the state that decides about it.

    process.is_early = False      # there is something to save: a stop signal no longer ends at once
    exit_now(ExitCode.HANG)

A process of a job cannot end as Python does: it would wait for the others in JAX's barrier. Nothing
here imports JAX, or takes long to import: signals are handled before anything else is imported.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn


@dataclass
class Process:
    """The facts about this process that its end depends on.

    Attributes:
      is_early: Whether it exits at once on a stop signal: there is nothing to save or to report.
      is_owned: Whether a command owns it, so that it may be ended.
      end_job: Function that ends it and its job, by its exit code and the reason; None without one.
      exit_code: Exit code of its command, once that is done.
      progress: Finished steps and phase, as its watchdog knows them.
      failures: Folder in which the first failure is kept, if any.
      forked_at: Time at which a spare has forked it, by `time.monotonic`; None if none has.
    """

    is_early: bool = False
    is_owned: bool = False
    end_job: Callable[[int, BaseException], NoReturn] | None = None
    exit_code: int | None = None
    progress: dict[str, object] = field(default_factory=lambda: {"step": None, "phase": None})
    failures: Path | None = None
    forked_at: float | None = None


process = Process()


def exit_now(code: int) -> NoReturn:
    """Exits past every `finally`, thread and barrier."""
    os._exit(code)


def is_at_prompt() -> bool:
    """Whether this is a Python prompt or a notebook, which continues when a call has ended."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def in_shell(environ: Mapping[str, str]) -> bool:
    """Whether a user types here: at a prompt, in a notebook, or in the shell of `srun --pty`."""
    return is_at_prompt() or (bool(environ.get("SLURM_PTY_PORT")) and os.isatty(0))


def write_line(text: str) -> None:
    """Writes a line directly, past all buffers and locks that an interrupted thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"jddp: {text}\n".encode())


def show_cursor() -> None:
    """Shows the cursor again after a live line has hidden it; for use before `exit_now`."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
