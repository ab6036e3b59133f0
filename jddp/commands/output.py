"""Files that options of commands name: tried before minutes of work, and written after them."""

from pathlib import Path

from jddp.errors import file_errors
from jddp.files import check_writable


def check_output(option: str, path: Path | None) -> None:
    """Refuses a file that cannot be written, if one is named; what is there stays as it is.

    Raises:
      FileSystemError: If it cannot.
    """
    if path is not None:
        with file_errors(f"{option} {path} cannot be written"):
            check_writable(path)


def write_output(option: str, path: Path, text: str) -> None:
    """Writes a file.

    Raises:
      FileSystemError: If it cannot be written.
    """
    with file_errors(f"{option} {path} cannot be written"):
        path.write_text(text, encoding="utf-8")
