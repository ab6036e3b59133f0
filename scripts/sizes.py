"""Prints how large jddp is, beside its budgets and goals, and fails if a budget is exceeded.

    python scripts/sizes.py

A line counts if it holds code: docstrings, comments and blank lines are free. Structure is
budgeted, not lines: jddp/ has a ceiling, 16,000, which is its goal here while it is exceeded. A
budget changes with a decision (docs/decisions.md), never to fit what was written.

- Parameters of a function are counted without self and without the keyword-only ones of a public
  function, which are options. Tuples are those of return annotations, nested ones included.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jddp"
DOORS = "commands"  # The floor of test_layers.py whose rooms only parse and call.
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """One figure of the table, with the most that it may be and what it is to become."""

    name: str
    value: float
    budget: float
    goal: float
    where: str = ""

    def __str__(self) -> str:
        """The line of the table."""
        line = f"{self.name:36}{self.value:8,} of {self.budget:,}"
        line += f"  goal {self.goal:,}" * (self.value > self.goal)
        return line + f"  ({self.where})" * bool(self.where) + "  TOO MANY" * self.is_exceeded

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


def count_lines(paths: Iterable[Path]) -> int:
    """Counts the lines with code of some files."""
    return sum(len(code_lines(path.read_text())) for path in paths)


def room_of(path: Path) -> str:
    """Names the package of a file under jddp/, or the module where it is in none."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def functions(
    node: ast.AST, name: str = "", is_public: bool = True
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, bool]]:
    """Every function below `node`, its name with its classes, and whether users may call it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(child, name, is_public)
            continue
        own, is_known = f"{name}.{child.name}".strip("."), is_public and is_public_name(child.name)
        if isinstance(child, ast.ClassDef):
            yield from functions(child, own, is_known)
        else:
            yield child, own, is_known
            yield from functions(child, own, False)


def is_public_name(name: str) -> bool:
    """Whether a name is for users: `__init__` is, `_step` is not."""
    return not name.startswith("_") or name.endswith("__")


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, is_public: bool) -> int:
    """Counts parameters, without self and the options of a public function."""
    positional = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
    has_self = positional[:1] in (["self"], ["cls"])
    return len(positional) - has_self + len(function.args.kwonlyargs) * (not is_public)


def largest_tuple(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the items of the largest tuple that a function is annotated to return."""
    sizes = [0]
    for node in ast.walk(function.returns) if function.returns else ():
        match node:
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
                is_open = any(getattr(item, "value", None) is ... for item in items)
                sizes.append(1 if is_open else len(items))
    return max(sizes)


def of_class(path: Path, name: str) -> int:
    """Counts the lines with code of one class."""
    source = path.read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return len(code_lines(source) & {*range(node.lineno, node.end_lineno + 1)})
    return 0


def assigned(path: Path, name: str) -> object:
    """The literal that a file assigns to a name, without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} assigns nothing to {name}")


def sizes() -> list[Size]:
    """Every figure that has a budget."""
    modules = sorted(PACKAGE.rglob("*.py"))
    code = count_lines(modules)
    floors = assigned(ROOT / "tests/parts/project/test_layers.py", "FLOORS")
    rooms = {room_of(path) for path in modules} - floors[DOORS] - {"__init__"}
    parameters, tuples = (0, ""), (0, "")
    for path in modules:
        for function, name, is_public in functions(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{name}"
            parameters = max(parameters, (count_parameters(function, is_public), where))
            tuples = max(tuples, (largest_tuple(function), where))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    facade = of_class(PACKAGE / "data_parallel.py", "DataParallel")
    return [
        Size("jddp/", code, 17_400, 16_000),
        Size("lines of DataParallel", facade, 250, 250),
        Size("rooms at the top level", len(rooms), 20, 20),
        Size("floors", len(floors), 10, 10),
        Size("parameters of a function", parameters[0], 8, 8, parameters[1]),
        Size("items of a returned tuple", tuples[0], 3, 3, tuples[1]),
        Size("public names", len(assigned(PACKAGE / "__init__.py", "_HOMES")), 26, 26),
        Size("dependencies", len(project["dependencies"]), 12, 12),
    ]


def main() -> int:
    """Prints the tables; returns 1 if a budget is exceeded."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[room_of(path)] += count_lines([path])
    for room, count in sorted(lines.items()):
        print(f"  {room:24}{count:6,}")
    found = sizes()
    print(*found, sep="\n")
    exceeded = any(size.is_exceeded for size in found)
    if exceeded:
        print("Make it smaller, or raise the budget and say why in docs/decisions.md.")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
