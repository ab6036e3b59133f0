"""Lists the checkpoints of a directory, and checks their files and arrays."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jddp.checkpoint import reader
from jddp.checkpoint.arrays import find_altered
from jddp.engine.mesh import make_mesh, replicate
from jddp.errors import FileSystemError, printable


def lines(directory: Path) -> Iterator[str]:
    """A line for each checkpoint, damaged ones included: step, size, loss."""
    for folder in sorted(filter(Path.is_dir, directory.iterdir()), key=_order):
        with contextlib.suppress(FileNotFoundError):  # of one that a run removes meanwhile
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            line = f"{folder.name:>12}  {size / 2**20:10.1f} MiB  {_metrics(folder)}"
            yield printable(line.rstrip())


def _order(folder: Path) -> tuple[int, str]:
    step, _, rest = folder.name.partition(".")
    return (int(step) if step.isdecimal() else 0, rest)


def _metrics(folder: Path) -> str:
    try:
        run = reader.read_object(folder / "run.json")
        last = run["evaluations"][-1] if run.get("evaluations") else run.get("metrics", {})
        numbers = {name: x for name, x in last.items() if isinstance(x, int | float)}
    except (FileSystemError, AttributeError, LookupError, TypeError):
        return "not readable"
    return "  ".join(f"{name} {x:.4g}" for name, x in numbers.items() if name != "step")


def find_any_damage(folder: Path) -> str | None:
    """Describes the first file or array of a checkpoint that has changed; None if there is none."""
    try:
        if (fault := reader.find_fault(folder)) is not None:
            return fault
        described = reader.read_described(folder)
        arrays = replicate(reader.read_arrays(folder), make_mesh(1))
    except FileSystemError as error:
        return str(error)
    return find_altered(arrays, described)
