"""Prints how large jddp is, beside the budgets it keeps, and fails if one is exceeded.

    python scripts/sizes.py

A line counts if it holds code: docstrings, comments and blank lines are free.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What makes, places and runs a step; its packages hold more, such as metrics and evaluation.
CORE = {
    "reduce": {
        *("average", "backward", "gradients", "hooks", "packing", "parts"),
        *("plan", "powersgd", "reduction"),
    },
    "engine": {
        *("state", "mesh", "backward", "step", "compiled"),
        *("guard", "optimizer", "sync", "view"),
    },
    "modules": {"functional", "base", "linen", "nnx", "batch_norm"},
    "data_parallel": {"data_parallel"},
    "init": {"init"},
}
BUDGETS = {"core lines": 2_950, "jddp lines": 13_300, "public names": 26, "dependencies": 12}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_code_lines(source: str) -> int:
    """Counts the lines of `source` that hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def room_of(path: Path) -> str:
    """Names the package of a file under jddp/, or the module where it is in none."""
    return path.relative_to(ROOT / "jddp").parts[0].removesuffix(".py")


def count_public_names() -> int:
    """Counts the names in `jddp.__all__`, those of `_HOMES`, without importing it."""
    for node in ast.parse((ROOT / "jddp" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_HOMES":
            return len(ast.literal_eval(node.value))
    return 0


def main() -> int:
    """Prints the table; returns 1 if a budget is exceeded."""
    lines, core = Counter(), Counter()
    for path in sorted((ROOT / "jddp").rglob("*.py")):
        room, size = room_of(path), count_code_lines(path.read_text())
        lines[room] += size
        core[room] += size * (path.stem in {"__init__", *CORE[room]} if room in CORE else 0)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sizes = {
        "core lines": core.total(),
        "jddp lines": lines.total(),
        "public names": count_public_names(),
        "dependencies": len(project["dependencies"]),
    }
    for room, count in sorted(lines.items()):
        print(f"  {room:24}{count:6,}" + f"{core[room]:6,} of the core" * (core[room] > 0))
    exceeded = [name for name, size in sizes.items() if size > BUDGETS[name]]
    for name, size in sizes.items():
        print(f"{name:26}{size:6,} of {BUDGETS[name]:,}{'  TOO MANY' * (name in exceeded)}")
    if exceeded:
        print("Make it smaller, or raise the budget and say why in docs/decisions.md.")
    return bool(exceeded)


if __name__ == "__main__":
    sys.exit(main())
