"""Ceilings: the most that each figure of `sizes.py` may be, which only fall.

    hold([Figure("public names", value=41, goal=40)], lower=True)

They are in ceilings.toml. A figure that has none yet gets its value of today. The lowest ceiling of
each figure is read from Git; without Git or history, as in an exported checkout, the file decides.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".toml")
HEADER = "# The most that each figure of sizes.py may be. scripts/check lowers it; none rises.\n"
Ceilings = Mapping[str, int]
# Issue Y (48) may add 700 code lines, a tenth of them imports: by so much its commits may raise.
ISSUE_Y = {"code lines of jddp/": 700, "code lines of the core": 700, "lines of imports": 70}


class Figure(NamedTuple):
    """A figure, and what it is to become.

    Attributes:
      rests: Whether its ceiling falls to the goal and no lower.
    """

    name: str
    value: int
    goal: int
    where: str = ""
    rests: bool = True

    @property
    def lowest(self) -> int:
        """The ceiling that the value of today gives."""
        return max(self.value, self.goal) if self.rests else self.value

    def line(self, ceilings: Ceilings) -> str:
        """The line of the table."""
        ceiling = ceilings.get(self.name)
        line = f"{self.name:42}{self.value:8,}"
        line += " without a ceiling" if ceiling is None else f" of {ceiling:,}"
        if self.value > self.goal:
            line += f"  goal {self.goal:,}"
        if self.where:
            line += f"  ({self.where.replace('jddp.', '')})"
        if self.is_above(ceilings):
            line += "  TOO MANY"
        return line

    def is_above(self, ceilings: Ceilings) -> bool:
        """Whether it is above its ceiling."""
        return self.value > ceilings.get(self.name, self.value)


def read(file: Path = FILE) -> dict[str, int]:
    """The stored ceilings by the names of their figures."""
    return tomllib.loads(file.read_text()) if file.exists() else {}


def write(ceilings: Ceilings, file: Path = FILE) -> None:
    """Stores ceilings."""
    lines = (f'"{name}" = {ceiling}\n' for name, ceiling in ceilings.items())
    file.write_text(HEADER + "".join(lines))


def hold(figures: Sequence[Figure], *, lower: bool, file: Path = FILE) -> int:
    """Prints the table; returns 1 if a figure is above its ceiling or a ceiling above its lowest.

    Args:
      figures: All figures.
      lower: Whether ceilings above a figure are lowered, unless one was raised.
      file: The stored ceilings.
    """
    stored = read(file)
    print(*(figure.line(stored) for figure in figures), sep="\n")
    is_above = any(figure.is_above(stored) for figure in figures)
    if is_above:
        print('Make it smaller: see "The ceiling" in CONTRIBUTING.md.')
    wrong = raised(stored, lowest_ever(file), figures)
    if wrong:
        print(f"RAISED in {file.name}, where ceilings only fall: {', '.join(wrong)}")
    elif lower and (new := lowered(stored, figures)) != stored:
        write(new, file)
        names = [name for name in new if new[name] != stored.get(name)]
        print(f"Lowered in {file.name}, which is to be committed: {', '.join(names)}")
    return int(is_above or bool(wrong))


def lowered(ceilings: Ceilings, figures: Iterable[Figure]) -> dict[str, int]:
    """The ceilings after the figures of today; a figure that was not counted keeps its own."""
    new = {figure.name: figure.lowest for figure in figures}
    for name, ceiling in ceilings.items():
        new[name] = min(ceiling, new.get(name, ceiling))
    return new


def lowest_ever(file: Path = FILE) -> dict[str, int]:
    """The lowest ceiling of each figure in all commits up to this one; {} where Git knows none.

    Commits of merged branches count too: a merge has to take the lower of two ceilings.
    """
    shown = ["-p", "-m", "--full-history", "--text", "--no-color", "--no-ext-diff", "--format="]
    command = ["git", "log", *shown, "--", file.name]
    try:
        log = subprocess.run(command, cwd=file.parent, capture_output=True, text=True).stdout
    except OSError:
        return {}
    lowest: dict[str, int] = {}
    for name, ceiling in re.findall(r'^\+"(.+)" = (\d+)$', log, re.MULTILINE):
        lowest[name] = min(int(ceiling), lowest.get(name, int(ceiling)))
    return lowest


def raised(ceilings: Ceilings, lowest: Ceilings, figures: Iterable[Figure]) -> list[str]:
    """The figures whose ceilings are above their lowest and its allowance, or were dropped."""
    names = [figure.name for figure in figures if figure.name in lowest]
    return [
        f"{name} ({ceilings.get(name, 'dropped')}, was {lowest[name]})"
        for name in names
        if name not in ceilings or ceilings[name] > lowest[name] + ISSUE_Y.get(name, 0)
    ]
