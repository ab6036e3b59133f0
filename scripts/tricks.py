"""Counts what is risky about a process: its hard ends, its global variables, and its tricks.

A trick reaches into the interpreter or replaces what a library holds: a private attribute of the
standard library, an attribute of it that is assigned, bytecode, frames, another program in the same
process, a file descriptor in the place of another. `sys` has hooks and streams that are there to be
replaced. What an import changes is not counted here but seen by `effects`.
"""

import ast
import re
import sys
from collections.abc import Iterator

from origins import origins, used
from structure import Modules

EXIT = "os._exit"
TRICKS = re.compile(
    r"dis\.|os\.(exec|dup)|posix\.|ctypes\.pythonapi|gc\.get_|inspect\.(currentframe|stack)"
    r"|sys\.(settrace|setprofile)|(?!os\._exit$)(\w+\.)+_[a-z]"
)
REPLACEABLE = re.compile(r"sys\.(\w+hook|stdin|stdout|stderr)")


def hard_exits(modules: Modules) -> list[str]:
    """Places that end the process without its cleanup."""
    return [f"{place}:{node.lineno}" for place, origin, node in _library(modules) if origin == EXIT]


def globals_of(modules: Modules) -> list[str]:
    """Statements by which functions assign to variables of their module."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]


def tricks(modules: Modules) -> list[str]:
    """Tricks by module: one that a module plays twice counts once."""
    places = {
        f"{name}: {origin}": None
        for name, origin, node in _library(modules)
        if TRICKS.match(origin) or (_is_assigned(node) and not REPLACEABLE.fullmatch(origin))
    }
    return [*places]


def _library(modules: Modules) -> Iterator[tuple[str, str, ast.Name | ast.Attribute]]:
    """What modules use of the standard library: the module, the full name, and where."""
    for name, tree in modules.items():
        for origin, node in used(tree, origins(name, tree)):
            if "." in origin and origin.partition(".")[0] in sys.stdlib_module_names:
                yield name, origin, node


def _is_assigned(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
