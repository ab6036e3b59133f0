"""Counts how jddp is built, from its source and without importing it; `sizes.py` prints the counts.

modules = read_modules()                # {"jddp.ground.names": its syntax tree, ...}
reached("jddp.engine.step", imports(modules))
"""

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jddp"
Modules = Mapping[str, ast.Module]
Imports = Mapping[str, set[str]]  # names of modules, by those of the modules that import them
Function = ast.FunctionDef | ast.AsyncFunctionDef


def paths() -> dict[str, Path]:
    """The files of all modules, by the names of the modules."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = (".".join(x.relative_to(ROOT).with_suffix("").parts) for x in files)
    return {name.removesuffix(".__init__"): x for name, x in zip(names, files, strict=True)}


def read_modules() -> dict[str, ast.Module]:
    """The syntax trees of all modules, by their names."""
    return {name: ast.parse(path.read_text()) for name, path in paths().items()}


def room_of(name: str) -> str:
    """The package of a module below jddp, or itself where it is in none.

    Modules that are run and never imported, `jddp.train` and its like, belong to the commands.
    """
    room, _, inner = name.removeprefix("jddp.").partition(".")
    homes = (PACKAGE / home / f"{room}.py" for home in ("commands", "workbench"))
    is_door = inner == "__main__" or (not inner and any(home.exists() for home in homes))
    return "commands" if is_door or room == "__main__" else room


def imports(modules: Modules) -> dict[str, set[str]]:
    """The modules of jddp that each imports: in functions, for types and by a string too."""
    found = {
        name: {_module_in(target, modules) for target in targets(tree)} - {""}
        for name, tree in modules.items()
    }
    found["jddp"] = set()  # It names the modules of all public names, and imports one when asked.
    return found


def targets(tree: ast.Module) -> Iterator[str]:
    """What a module imports, as `module` or `module.name`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=name)]
            ):
                yield str(name)


def _module_in(target: str, modules: Modules) -> str:
    """The module that is imported as this, or that holds the name; empty for no module of jddp."""
    if target in modules:
        return target
    above = target.rpartition(".")[0]
    return above if above in modules else ""


def reached(name: str, imported: Imports) -> set[str]:
    """The modules that one imports, directly or through others."""
    found, below = set[str](), {name}
    while below:
        found |= below
        below = set().union(*(imported[x] for x in below)) - found
    return found - {name}


def circles(imported: Imports) -> list[set[str]]:
    """The largest sets of modules that import each other, directly or through others."""
    below = {name: reached(name, imported) for name in imported}
    found = {frozenset({name, *(x for x in below[name] if name in below[x])}) for name in imported}
    return [set(names) for names in found if len(names) > 1]


def import_lines(tree: ast.Module) -> set[int]:
    """The numbers of the lines of all import statements."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def defined_twice(modules: Modules) -> list[str]:
    """Public classes, functions and types that several modules define, but for `main`."""
    homes = Counter(name for tree in modules.values() for name in {*_definitions(tree)})
    return sorted(name for name, count in homes.items() if count > 1 and name != "main")


def _definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if not name.startswith("_"):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if re.match("[A-Z][a-z]", name):
                yield name


def private_in_many(modules: Modules, at_least: int = 4) -> list[str]:
    """Private names, constants included, that so many modules define at their top level."""
    homes = Counter(name for tree in modules.values() for name in {*_private_names(tree)})
    return sorted(name for name, count in homes.items() if count >= at_least)


def _private_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names = [name]
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if name.startswith("_") and not name.endswith("__"))


def config_keys(modules: Modules) -> list[str]:
    """The keys that the sections of a config declare, nested sections among them, as `Class.key`.

    A key that several sections inherit counts once, where it is declared.
    """
    config = [tree for name, tree in modules.items() if room_of(name) == "config"]
    classes = [node for tree in config for node in tree.body if isinstance(node, ast.ClassDef)]
    sections = {"BaseModel"}
    for _ in classes:  # as often as a class can be derived from another
        sections |= {node.name for node in classes if sections & {*map(_last_name, node.bases)}}
    return [
        f"{section.name}.{field.target.id}"
        for section in classes
        if section.name in sections
        for field in section.body
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation)
    ]


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[Function, str]]:
    """Every function below `node`, and its name with its classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef):
            yield from functions(child, name)
            continue
        full = f"{name}.{child.name}".strip(".")
        if isinstance(child, Function):
            yield child, full
        yield from functions(child, full)


def count_parameters(function: Function) -> int:
    """Counts all parameters but self, keyword-only ones included."""
    positional = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
    has_self = positional[:1] in (["self"], ["cls"])
    return len(positional) - has_self + len(function.args.kwonlyargs)


def largest_tuple(function: Function) -> int:
    """Counts the items of the largest tuple that a function is annotated to return."""
    sizes = [0]
    for node in ast.walk(function.returns) if function.returns else ():
        match node:
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
                is_open = any(getattr(item, "value", None) is ... for item in items)
                sizes.append(1 if is_open else len(items))
    return max(sizes)


def options_of(modules: Modules, function: str) -> int:
    """Counts the keyword-only parameters of the function of a name that has the most."""
    every = (found for tree in modules.values() for found in functions(tree))
    counts = [len(node.args.kwonlyargs) for node, name in every if name == function]
    return max(counts, default=0)


def members_of(tree: ast.Module, name: str) -> int:
    """Counts the public methods, properties and attributes that a class defines."""
    found = set[str]()
    for node in _class(tree, name).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return sum(not name.startswith("_") for name in found)


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)


def median_and_decile(numbers: Iterable[int]) -> tuple[int, int]:
    """The median, and the ninth decile."""
    ordered = sorted(numbers)
    return round(statistics.median(ordered)), ordered[len(ordered) * 9 // 10]
