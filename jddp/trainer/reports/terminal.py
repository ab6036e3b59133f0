"""The terminal in which a process runs: its width, text that fits it, and its live display."""

import os
import shutil
import textwrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

COLUMNS = 80  # of a file or a pipe
NARROWEST, WIDEST = 40, 100
BAR_COLUMNS = 10
NARROWEST_WITH_BAR = 60


def is_watched(stream: TextIO) -> bool:
    """Whether this is the terminal that the process runs in.

    Open MPI gives every process a pseudo-terminal, whose output goes into a pipe. There one live
    line would become thousands.
    """
    try:
        return bool(stream.isatty() and os.tcgetpgrp(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # of no session, of another one, or closed
        return False


def columns_of(stream: TextIO) -> int:
    """The width for text: that of the terminal now, from 40 to 100; 80 of a file or a pipe."""
    if not is_watched(stream):
        return COLUMNS
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def unbroken(text: str) -> str:
    """The text as one word, which `wrap` does not divide."""
    return text.replace(" ", "\xa0")


def wrap(text: str, columns: int, *, indent: str = "  ") -> list[str]:
    """The lines of a text. A path stays whole, so that it can be copied."""
    lines = textwrap.wrap(
        text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\xa0", " ") for line in lines]


def live_display(num_steps: int, stream: TextIO) -> "Progress | None":
    """A bar and lines at the bottom of a terminal; None of one that cannot move its cursor."""
    from rich.console import Console  # Only a terminal needs it, and it costs 0.1 s.
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

    console = Console(file=stream, highlight=False)
    if console.is_dumb_terminal:
        return None
    has_room = columns_of(stream) >= NARROWEST_WITH_BAR
    bar: list[ProgressColumn] = [BarColumn(BAR_COLUMNS)] if has_room else []
    text = TextColumn("{task.description}", markup=False)
    display = Progress(*bar, text, console=console, refresh_per_second=2)
    display.add_task("compiling", total=num_steps)
    display.start()
    return display


def live_columns(stream: TextIO) -> int:
    """The width for the text of the live display."""
    columns = columns_of(stream)
    return columns - BAR_COLUMNS - 1 if columns >= NARROWEST_WITH_BAR else columns
