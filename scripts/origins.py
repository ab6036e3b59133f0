"""Reads what a name in a module means, however it was imported.

homes = origins("jddp.a", tree)   # {"leave": "os._exit"} for `from os import _exit as leave`
[*used(tree, homes)]              # [("os._exit", node), ...]
"""

import ast
from collections.abc import Iterator, Mapping

Chain = ast.Name | ast.Attribute


def origins(module: str, tree: ast.Module) -> dict[str, str]:
    """The full name of each name that a module imports, or assigns at its top level."""
    homes = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                homes[name] = f"{module}.{name}"
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    bound = alias.name if alias.asname else alias.name.partition(".")[0]
                    homes[alias.asname or bound] = bound
            case ast.ImportFrom(module=str(source), names=names):
                homes |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in names}
    return homes


def used(node: ast.AST, homes: Mapping[str, str]) -> Iterator[tuple[str, Chain]]:
    """The uses of the names in `homes`, with their attributes as in `os.path.join`, in full."""
    first, dot, rest = _dotted(node).partition(".")
    if first in homes:
        yield homes[first] + dot + rest, node
    elif not first:
        for child in ast.iter_child_nodes(node):
            yield from used(child, homes)


def _dotted(node: ast.AST) -> str:
    """The text of a chain of attributes that begins with a name, else nothing."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if above := _dotted(value):
            return f"{above}.{attr}"
    return ""
