"""Pictures of tables that stand elsewhere: the floors of the packages, and results.

Floors are read from tests/project/test_layers.py, figures from benchmarks/README.md. The
docstring of a function is the title of its picture, and what a screen reader reads.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from canvas import EDGE, INNER, SMALL, WIDTH, Picture, text_width

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ROOT / "tests" / "project" / "test_layers.py"
RESULTS = ROOT / "benchmarks" / "README.md"

# Rows of the tables of results by the beginnings of their first cells, and their names here.
BY_HAND = {
    "`cnn`": "CNN, step",
    "`gpt`": "GPT, step",
    "`pmap`": "CNN, step by pmap",
    "`loop`": "CNN, fit",
}
TORCH = {"(a)": "2 processes", "(b)": "2 devices"}
LEAST, ONE, PER_UNIT = 0.55, 234.0, 130.0  # smallest ratio that fits, where 1 stands, units for 1


def floors() -> dict[str, list[str]]:
    """The rooms on each floor, from the ground up.

    Raises:
      LookupError: If the table is not where it was.
    """
    for node in ast.parse(LAYERS.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="FLOORS")], value=value):
                return {floor: sorted(rooms) for floor, rooms in ast.literal_eval(value).items()}
    raise LookupError(f"{LAYERS} assigns nothing to FLOORS.")


def architecture() -> str:
    """The packages of jddp on their floors.

    A package imports only from floors below its own. Floors from the top:
    """
    rows = [*floors().items()][::-1]
    facts = "; ".join(f"{floor}: {', '.join(rooms)}" for floor, rooms in rows)
    picture = Picture(architecture.__doc__, facts + ".")
    y = 16.0
    for floor, rooms in rows:
        lines: list[list[str]] = [[]]
        for room in rooms:
            if sum(map(_room_width, [*lines[-1], room])) > INNER - 46:
                lines.append([])
            lines[-1].append(room)
        picture.rect(EDGE, y, INNER - 30, 30 + 30 * len(lines), "plain")
        picture.text(EDGE + 8, y + 19, floor, "quiet")
        for line in lines:
            x = EDGE + 8
            for room in line:
                picture.box(x, y + 27, _room_width(room) - 6, 26, room, "rows", style="code")
                x += _room_width(room)
            y += 30
        y += 34
    picture.arrow(WIDTH - EDGE - 11, 18, WIDTH - EDGE - 11, y - 6)
    y = picture.notes(y + 4, "A package imports only from floors below its own.")
    return picture.svg(y + 8)


def _room_width(room: str) -> float:
    """Width of the box of a room, with the space to the next."""
    return text_width(room, SMALL, "code") + 18


class Result(NamedTuple):
    """A ratio of times, and that of the reference to a second copy of itself."""

    name: str
    ratio: float
    noise: float


class Table:
    """The first table below a heading of the page of results.

    Args:
      heading: How the heading begins.

    Attributes:
      head: Cells of its first line.
      date: The date that stands last above it.

    Raises:
      LookupError: If there is none.
    """

    def __init__(self, heading: str) -> None:
        above, below, section = RESULTS.read_text().partition(f"\n## {heading}")
        found = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
        if not below or found is None:
            raise LookupError(f"{RESULTS} has no table below {heading!r}.")
        self._rows = [[*map(str.strip, x[1:-1].split("|"))] for x in found[0].splitlines()]
        self.head = self._rows[0]
        self.date = re.findall(r"\d{4}-\d\d-\d\d", above + section[: found.start()])[-1]

    def row(self, start: str) -> list[float]:
        """The first number in each cell of the row that begins like this; 0 where there is none.

        Raises:
          LookupError: If there is no such row, or another one.
        """
        found = [cells for cells in self._rows if cells[0].startswith(start)]
        if len(found) != 1:
            raise LookupError(f"{RESULTS}: {len(found)} rows begin with {start!r}.")
        numbers = (re.search(r"-?\d+(\.\d+)?", cell) for cell in found[0])
        return [float(x[0]) if x else 0.0 for x in numbers]


def results() -> str:
    """Time of a step of jddp over that of a reference.

    Below 1 jddp takes less time.
    """
    steps, torch = Table("Step time"), Table("Against PyTorch DDP")
    noise = torch.row("noise")
    groups = {
        "jddp / the same by hand": [
            Result(name, *steps.row(start)[3:5]) for start, name in BY_HAND.items()
        ],
        "jddp / PyTorch DDP in 2 processes": [
            Result(f"{torch.head[i]}, {name}", torch.row(start)[i], noise[i])
            for start, name in TORCH.items()
            for i in (1, 2)
        ],
    }
    facts = (
        f"{title}: {', '.join(f'{x.name} {x.ratio:g}' for x in found)}."
        for title, found in groups.items()
    )
    picture = Picture(results.__doc__, *facts)
    y = 28.0
    for title, found in groups.items():
        picture.text(EDGE, y, title, "strong")
        picture.line(ONE, y + 10, ONE, y + 10 + 30 * len(found))
        for i, result in enumerate(found):
            _lollipop(picture, y + 25 + 30 * i, result)
        y += 30 * len(found) + 46
    for x, words, anchor in ((-20, "less time", "end"), (0, "1", "middle"), (20, "more time", "")):
        picture.text(ONE + x, y - 18, words, "quiet", anchor=anchor or "start")
    picture.dot(EDGE + 10, y + 2, "rows")
    picture.text(EDGE + 30, y + 7, "time of jddp / reference", "quiet")
    y = picture.legend(y + 18, {"plain": "noise: the reference / a copy of it"})
    dates = " and ".join(sorted({steps.date, torch.date}))
    y = picture.notes(y, f"On CPUs, {dates}. Machines and", "commands: benchmarks/README.md.")
    return picture.svg(y + 8)


def _lollipop(picture: Picture, y: float, result: Result) -> None:
    """A result as a dot, on the noise, to both sides of 1."""
    at, noise = ONE + PER_UNIT * (result.ratio - 1), PER_UNIT * abs(result.noise - 1)
    picture.text(EDGE, y + 5, result.name, room=ONE + PER_UNIT * (LEAST - 1) - EDGE)
    if noise:
        picture.rect(ONE - noise, y - 11, 2 * noise, 22, "plain")
        picture.line(ONE, y - 11, ONE, y + 11)
    picture.line(ONE, y, at, y)
    picture.dot(at, y, "rows")
    picture.text(WIDTH - EDGE, y + 5, f"{result.ratio:g}", "strong", anchor="end")
