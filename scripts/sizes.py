"""Prints how large jddp is and how it is built, beside budgets and goals; fails if one is exceeded.

    python scripts/sizes.py

A line counts if it holds code: docstrings, comments and blank lines are free. Where a budget is not
its goal yet it is the lowest value that there has been, and may only fall: lower it with the value.
Any other change of a budget is a decision (docs/decisions.md), and never to fit what was written.

- Imports are those at the top, in functions, for types, and by a string.
- Parameters of a function are counted without self and without the keyword-only ones of a public
  function, which are options. Tuples are those of return annotations, nested ones included.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import structure
from structure import PACKAGE, ROOT, room_of

DOORS = "commands"  # The floor of test_layers.py whose rooms only parse and call.
UNTYPED = {"modules", "names", "zoo"}  # Rooms in which users' models and functions may be anything.
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Figure(NamedTuple):
    """One figure of the table, with the most that it may be and what it is to become."""

    name: str
    value: float
    budget: float
    goal: float
    where: str = ""

    def __str__(self) -> str:
        """The line of the table."""
        line = f"{self.name:42}{self.value:8,} of {self.budget:,}"
        if self.value > self.goal:
            line += f"  goal {self.goal:,}"
        if self.where:
            line += f"  ({self.where})"
        if self.is_exceeded:
            line += "  TOO MANY"
        return line

    @property
    def is_exceeded(self) -> bool:
        """Whether it is larger than its budget."""
        return self.value > self.budget


def code_lines(source: str) -> set[int]:
    """The numbers of the lines of `source` that hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def assigned(path: Path, name: str) -> object:
    """The literal that a file assigns to a name, without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} assigns nothing to {name}")


def imported(modules: structure.Modules) -> list[Figure]:
    """What imports what."""
    imports = structure.imports(modules)
    circles = structure.circles(imports)
    names = ", ".join(sorted({room_of(name) for circle in circles for name in circle}))
    facade = structure.reached("jddp.data_parallel", imports)
    step = structure.reached("jddp.engine.step", imports)
    return [
        Figure("circles of imports", len(circles), 0, 0, names),
        Figure("modules that data_parallel imports", len(facade), 93, 50),
        Figure("modules that engine/step imports", len(step), 32, 32),
    ]


def named(modules: structure.Modules, lines: dict[str, set[int]]) -> list[Figure]:
    """Names, options and members."""
    typed = {name: tree for name, tree in modules.items() if room_of(name) not in UNTYPED}
    num_lines = sum(len(lines[name]) for name in typed)
    untyped = round(1000 * structure.count_names(typed, "Any") / num_lines, 1)
    twice = structure.defined_twice(modules)
    options = structure.options_of(modules, "DataParallel.__init__")
    fit = structure.options_of(modules, "fit")
    members = structure.members_of(modules["jddp.data_parallel"], "DataParallel")
    parts = structure.questions_to_parts(modules, "jddp.engine.spec")
    effects = [
        f"{name}:{line}"
        for name, tree in modules.items()
        for line in structure.effects_at_import(tree)
    ]
    public = assigned(PACKAGE / "__init__.py", "_HOMES")
    return [
        Figure("Any, in 1,000 lines", untyped, 5.1, 8),
        Figure("public names defined twice", len(twice), 4, 4, ", ".join(twice)),
        Figure("options of DataParallel", options, 14, 16),
        Figure("options of fit", fit, 17, 16),
        Figure("public members of DataParallel", members, 14, 14),
        Figure("public names", len(public), 41, 40),
        Figure("isinstance on a part", len(parts), 0, 0, ", ".join(parts)),
        Figure("effects at import", len(effects), 0, 0, ", ".join(effects)),
    ]


def functions(modules: structure.Modules, lines: dict[str, set[int]]) -> list[Figure]:
    """Lengths, parameters and results of functions."""
    sizes, parameters, tuples = [], (0, ""), (0, "")
    for module, tree in modules.items():
        for function, name, is_public in structure.functions(tree):
            where = f"{module}:{name}"
            own = range(function.lineno, function.end_lineno + 1)
            sizes.append(len(lines[module].intersection(own)))
            parameters = max(parameters, (structure.count_parameters(function, is_public), where))
            tuples = max(tuples, (structure.largest_tuple(function), where))
    median, decile = structure.median_and_decile(sizes)
    return [
        Figure("lines of a function, median", median, 6, 6),
        Figure("lines of a function, ninth decile", decile, 16, 16),
        Figure("parameters of a function", parameters[0], 8, 8, parameters[1]),
        Figure("items of a returned tuple", tuples[0], 3, 3, tuples[1]),
    ]


def whole(modules: structure.Modules, num_lines: int) -> list[Figure]:
    """The package."""
    floors = assigned(ROOT / "tests/parts/project/test_layers.py", "FLOORS")
    rooms = {room_of(name) for name in modules} - floors[DOORS] - {"jddp"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        Figure("jddp/", num_lines, 30_308, 16_000),
        Figure("rooms at the top level", len(rooms), 23, 23),
        Figure("floors", len(floors), 10, 10),
        Figure("dependencies", len(project["dependencies"]), 12, 12),
    ]


def main() -> int:
    """Prints the tables; returns 1 if a budget is exceeded."""
    modules = structure.read_modules()
    lines = {name: code_lines(path.read_text()) for name, path in structure.paths().items()}
    rooms: Counter[str] = Counter()
    for name, numbers in lines.items():
        rooms[room_of(name)] += len(numbers)
    for room, count in sorted(rooms.items()):
        print(f"  {room:24}{count:6,}")
    figures = [
        *whole(modules, rooms.total()),
        *imported(modules),
        *named(modules, lines),
        *functions(modules, lines),
    ]
    print(*figures, sep="\n")
    exceeded = any(figure.is_exceeded for figure in figures)
    if exceeded:
        print('Make it smaller: see "The ceiling" in CONTRIBUTING.md.')
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
