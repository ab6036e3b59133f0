"""Sees which modules of jddp change what others hold, when they are imported.

A process of its own imports the libraries first and then module by module, and compares the
environment, logging, filters of warnings, `sys` and its modules before and after each. It starts
none of JAX's devices.
"""

import ast
import graphlib
import importlib
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import structure

SETTINGS = ("level", "propagate", "disabled", "handlers", "filters")


def can_import(dependencies: Iterable[str]) -> bool:
    """Whether this Python has the packages."""
    try:
        for package in dependencies:
            importlib.metadata.version(re.match(r"[\w-]+", package)[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def effects(modules: structure.Modules, root: Path = structure.ROOT) -> dict[str, list[str]]:
    """The changes that modules of the package in `root` make, by the names of these modules."""
    order = _order(structure.imports(modules))
    libraries = sorted({x for tree in modules.values() for x in _libraries(tree)})
    process = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([libraries, order]),
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def _order(imports: structure.Imports) -> list[str]:
    """The modules, each after those that it imports, so that an effect is seen where it is made."""
    try:
        return [*graphlib.TopologicalSorter(imports).static_order()]
    except graphlib.CycleError:
        return sorted(imports)


def _libraries(tree: ast.Module) -> Iterator[str]:
    """What the module imports from libraries at its top level, in `try` and `with` too."""
    blocks = [node.body for node in tree.body if isinstance(node, ast.Try | ast.With)]
    nodes = [node for body in (tree.body, *blocks) for node in body]
    top = ast.Module([x for x in nodes if isinstance(x, ast.Import | ast.ImportFrom)], [])
    yield from (name for name in structure.targets(top) if name.partition(".")[0] != "jddp")


def snapshot() -> dict[str, object]:
    """All that an import may change, by name."""
    state: dict[str, object] = {f"environ {name}": text for name, text in os.environ.items()}
    state["warnings"] = str(warnings.filters)
    for name, value in vars(sys).items():
        state[f"sys.{name}"] = str(value) if isinstance(value, list) else id(value)
    new = vars(logging.Logger(""))
    for name, logger in {"root": logging.root, **logging.root.manager.loggerDict}.items():
        for key in SETTINGS if isinstance(logger, logging.Logger) else ():
            if getattr(logger, key) != new[key]:
                state[f"logging {name}.{key}"] = str(getattr(logger, key))
    return state | {f"module {name}": id(module) for name, module in sys.modules.items()}


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What differs, other than new modules that are what their names say."""
    differing = sorted(x for x in before | after if before.get(x) != after.get(x))
    return [x for x in differing if x in before or not _is_new_module(x)]


def _is_new_module(name: str) -> bool:
    kind, _, name = name.partition(" ")
    module = sys.modules.get(name)
    is_ours = name.partition(".")[0] == "jddp"
    is_sound = isinstance(module, types.ModuleType) and module.__name__ == name
    return kind == "module" and (is_sound or not is_ours)


def _import(name: str) -> None:
    """Imports a module, or the module of a name; skips one for which a package is missing."""
    while name:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            name = name.rpartition(".")[0]
        else:
            return


def main() -> None:
    """Reads names of libraries and modules, and prints the changes by module."""
    libraries, modules = json.load(sys.stdin)
    for name in libraries:
        _import(name)
    seen = {}
    for name in modules:
        before = snapshot()
        _import(name)
        seen[name] = changes(before, snapshot())
    print(json.dumps({name: found for name, found in seen.items() if found}))


if __name__ == "__main__":
    main()
