"""Copies the first files of a project, examples/project, into a folder."""

import shutil
from pathlib import Path

from jddp.errors import UsageError, file_errors

# A wheel carries the files inside the package, a checkout beside it.
_ROOT = Path(__file__).parents[2]
FOLDERS = (_ROOT / "jddp" / "project", _ROOT / "examples" / "project")


def start_project(directory: Path) -> list[str]:
    """Writes the files into a new or empty folder; returns their names.

    Raises:
      UsageError: If the folder is not empty.
      FileSystemError: If it cannot be written.
    """
    files = sorted(next(folder for folder in FOLDERS if folder.is_dir()).glob("*.*"))
    with file_errors(f"{directory} cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty. Name a new folder.")
        for file in files:
            shutil.copyfile(file, directory / file.name)
    return [file.name for file in files]
