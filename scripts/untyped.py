"""Counts where jddp gives up on types: by `Any`, and by names that stand for it.

An alias of `Any` is a name that a module gives to `Any`, to another alias, or to a container of
one, as in `Batch = PyTree` and `Record = Mapping[str, Any]`. A signature, `Callable[..., Any]`, and
a tuple of so many items, `tuple[Params, Grads]`, are none. A use counts however it is imported.
"""

import ast
from collections.abc import Iterator

from origins import origins, used
from structure import Modules

ANY = "typing.Any"
OF_TYPES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.BinOp, ast.BitOr, ast.Constant)


def aliases(modules: Modules) -> tuple[set[str], set[str]]:
    """The aliases as `module.name`, and these with the names by which other modules import them."""
    homes = {module: origins(module, tree) for module, tree in modules.items()}
    made, known = set[str](), {ANY}
    while True:
        count = len(known)
        for module, tree in modules.items():
            known |= {f"{module}.{name}" for name, full in homes[module].items() if full in known}
            for name, value in _types(tree):
                if known & {full for full, _ in used(value, homes[module])}:
                    made.add(f"{module}.{name}")
        known |= made
        if len(known) == count:
            return made, known - {ANY}


def _types(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The types that a module gives names to, by their names."""
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if _is_type(value):
                yield name, value


def _is_type(value: ast.expr) -> bool:
    nodes = [*ast.walk(value)]
    is_record = any(_has_fields(node) for node in nodes)
    return not is_record and all(isinstance(node, (*OF_TYPES, ast.expr_context)) for node in nodes)


def _has_fields(node: ast.AST) -> bool:
    """Whether a type has places of different meanings: a signature, or a tuple of so many items."""
    match node:
        case ast.Name(id="Callable"):
            return True
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
            return not any(getattr(item, "value", None) is ... for item in items)
    return False


def count_uses(modules: Modules, names: set[str]) -> int:
    """Counts the places that use one of the names."""
    return sum(
        origin in names
        for module, tree in modules.items()
        for origin, _ in used(tree, origins(module, tree))
    )
