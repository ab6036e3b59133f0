"""Prints how large jddp is and how it is built, beside ceilings and goals; fails above a ceiling.

    python scripts/sizes.py             # the standard library is enough
    python scripts/sizes.py --lower     # also lowers the ceilings, as scripts/check does

A line counts if it holds code: docstrings, comments and blank lines are free. The core is all but
`jddp/workbench/`; lines may move there, so ceilings hold the core and both together. Counts have
ceilings and ratios have none, since a ratio can rise when code is deleted.

- Imports are those at the top, in functions, for types, and by a string. The code behind a module
  is its own and the code of all modules that it imports, directly or through others.
- Parameters of a function are all but self. `DataParallel` and `fit` have options, counted apart.
- Items of a tuple are those of return annotations, nested tuples included.
- Config keys are the fields that the sections in `jddp/config` declare. A nested section is a key,
  and a key that several sections inherit counts once.
- Effects at import are counted only where jddp's dependencies are installed.
"""

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import ceilings
import effects
import structure
import tricks
import untyped
from ceilings import Figure
from structure import PACKAGE, ROOT, room_of

DOORS = "commands"  # The room whose modules only parse and call.
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Lines = dict[str, set[int]]  # the numbers of the lines of code, by module


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


def whole(modules: structure.Modules, lines: Lines) -> list[Figure]:
    """The package."""
    floors = assigned(ROOT / "tests/project/test_layers.py", "FLOORS")
    rooms = {room_of(name) for name in modules} - {DOORS, "jddp"}
    num_lines = count(lines, modules)
    core = count(lines, [name for name in modules if room_of(name) != "workbench"])
    workbench = f"workbench {num_lines - core:,}, goal 5,000"
    imports = sum(len(structure.import_lines(tree)) for tree in modules.values())
    mean = f"{num_lines / len(modules):.0f} code lines each, goal 95"
    share = f"{100 * imports / num_lines:.1f} % of all, goal 9"
    return [
        Figure("code lines of jddp/", num_lines, 22_500, workbench, rests=False),
        Figure("code lines of the core", core, 17_500, rests=False),
        Figure("modules", len(modules), 220, mean),
        Figure("rooms", len(rooms), 13),
        Figure("floors", len(floors), 6),
        Figure("lines of imports", imports, 2_000, share),
        Figure("dependencies", len(dependencies()), 12),
    ]


def count(lines: Lines, modules: Iterable[str]) -> int:
    """Counts the code lines of modules."""
    return sum(len(lines[name]) for name in modules)


def dependencies() -> list[str]:
    """The packages that jddp needs."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def imported(modules: structure.Modules, lines: Lines) -> list[Figure]:
    """What imports what."""
    imports = structure.imports(modules)
    circles = structure.circles(imports)
    names = ", ".join(sorted({room_of(name) for circle in circles for name in circle}))
    facade = {"jddp.engine.data_parallel", *structure.reached("jddp.engine.data_parallel", imports)}
    step = {"jddp.engine.step", *structure.reached("jddp.engine.step", imports)}
    return [
        Figure("circles of imports", len(circles), 0, names),
        Figure("code lines behind data_parallel", count(lines, facade), 6_500),
        Figure("code lines behind engine/step", count(lines, step), 3_100),
    ]


def named(modules: structure.Modules) -> list[Figure]:
    """Names, keys, options and members."""
    aliases, spellings = untyped.aliases(modules)
    twice = structure.defined_twice(modules)
    private = structure.private_in_many(modules)
    options = structure.options_of(modules, "DataParallel.__init__")
    fit = structure.options_of(modules, "fit")
    members = structure.members_of(modules["jddp.engine.data_parallel"], "DataParallel")
    public = assigned(PACKAGE / "__init__.py", "_NAMES")
    return [
        Figure("uses of Any", untyped.count_uses(modules, {untyped.ANY}), 180),
        Figure("aliases of Any", len(aliases), 4),
        Figure("uses of aliases of Any", untyped.count_uses(modules, spellings), 250),
        Figure("public names defined twice", len(twice), 4, ", ".join(twice)),
        Figure("private names in 4 or more modules", len(private), 0, ", ".join(private)),
        Figure("config keys", len(structure.config_keys(modules)), 100),
        Figure("options of DataParallel", options, 16),
        Figure("options of fit", fit, 16),
        Figure("public members of DataParallel", members, 14),
        Figure("public names", len(" ".join(public.values()).split()), 40),
    ]


def functions(modules: structure.Modules, lines: Lines) -> list[Figure]:
    """Lengths, parameters and results of functions."""
    sizes, excess, many, tuples = [], 0, [], (0, "")
    for module, tree in modules.items():
        for function, name in structure.functions(tree):
            body = range(function.lineno, function.end_lineno + 1)
            sizes.append(len(lines[module].intersection(body)))
            parameters = structure.count_parameters(function)
            if parameters > 8 and name not in ("DataParallel.__init__", "fit"):
                excess += parameters - 8
                many.append(f"{name} {parameters}")
            tuples = max(tuples, (structure.largest_tuple(function), f"{module}:{name}"))
    median, decile = structure.median_and_decile(sizes)
    return [
        Figure("lines of a function, median", median, 6),
        Figure("lines of a function, ninth decile", decile, 16),
        Figure("parameters beyond 8 of a function", excess, 0, ", ".join(many)),
        Figure("items of a returned tuple", tuples[0], 3, tuples[1]),
    ]


def risky(modules: structure.Modules) -> list[Figure]:
    """What is done to the process and the interpreter."""
    places = tricks.tricks(modules)
    figures = [
        Figure("uses of os._exit", len(tricks.hard_exits(modules)), 1),
        Figure("statements with global", len(tricks.globals_of(modules)), 0),
        Figure("tricks with the interpreter", len(places), 0, ", ".join(places)),
    ]
    if effects.can_import(dependencies()):
        seen = effects.effects(modules)
        figures.append(Figure("modules with effects at import", len(seen), 0, ", ".join(seen)))
    return figures


def written() -> list[Figure]:
    """Tests and pages."""
    tests = sum(len(path.read_text().splitlines()) for path in ROOT.glob("tests/**/*.py"))
    words = sum(len(path.read_text().split()) for path in ROOT.glob("docs/**/*.md"))
    changes = len((ROOT / "CHANGELOG.md").read_text().splitlines())
    return [
        Figure("lines of tests", tests, 30_000),
        Figure("words of docs", words, 42_000),
        Figure("lines of the changelog", changes, 60),
    ]


def main() -> int:
    """Prints the tables; returns 1 if a figure is above its ceiling or a ceiling was raised."""
    parser = argparse.ArgumentParser(description="Prints how large jddp is and how it is built.")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the figures")
    arguments = parser.parse_args()
    modules = structure.read_modules()
    lines = {name: code_lines(path.read_text()) for name, path in structure.paths().items()}
    rooms: Counter[str] = Counter()
    for name, numbers in lines.items():
        rooms[room_of(name)] += len(numbers)
    for room, size in sorted(rooms.items()):
        print(f"  {room:24}{size:6,}")
    figures = [
        *whole(modules, lines),
        *imported(modules, lines),
        *named(modules),
        *functions(modules, lines),
        *risky(modules),
        *written(),
    ]
    return ceilings.hold(figures, lower=arguments.lower)


if __name__ == "__main__":
    sys.exit(main())
