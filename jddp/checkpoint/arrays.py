"""What a checkpoint says of its arrays: for each path its shape, dtype and digest.

describe(tree, found)  # {"params/Dense_0/kernel": {"shape": [16, 4], "dtype": "float32", ...}}
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from jddp.digest import as_words

PyTree = Any
Forms = dict[str, str]
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as "params/Dense_0/kernel", in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, PyTree]:
    """A tree of dicts, from leaves by their paths."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        inside = tree
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = leaf
    return tree


def describe(tree: PyTree, found: Any) -> dict[str, dict[str, Any]]:
    """Shape, dtype and digest of every array; `found` is what `jddp.digest` found."""
    words = as_words(found, tree)
    return {
        name: {"shape": list(x.shape), "dtype": str(x.dtype), "digest": word}
        for (name, x), word in zip(by_path(tree).items(), words, strict=True)
    }


def as_saved(words: Any, dtype: str) -> Any:
    """An array of a dtype in `describe`'s words, from the numbers that orbax reads without it."""
    impl = _key_impls().get(dtype)
    return words if impl is None else jax.random.wrap_key_data(words, impl=impl)


@functools.cache
def _key_impls() -> dict[str, str]:
    """How random keys are made, by what JAX calls their dtype."""
    return {str(jax.random.key(0, impl=impl).dtype): impl for impl in KEY_IMPLS}


def forms(described: Mapping[str, Mapping[str, Any]]) -> Forms:
    """Shape and dtype of every array, in words."""
    return {name: f"{tuple(x['shape'])} {x['dtype']}" for name, x in described.items()}


def forms_of(tree: PyTree) -> Forms:
    """The same of arrays, or of their shapes."""
    return {name: f"{tuple(x.shape)} {x.dtype}" for name, x in by_path(tree).items()}


def difference(there: Forms, here: Forms, *, most: int = 20) -> str:
    """A tree of the paths at which two sets of arrays differ; empty if they do not.

    Args:
      there: Of the checkpoint.
      here: Of the program.
      most: Paths that are shown, those of parameters first.
    """
    names = sorted({*there, *here}, key=lambda name: (not name.startswith("params"), name))
    differ = [name for name in names if there.get(name) != here.get(name)]
    lines: list[str] = []
    above: list[str] = []
    for name in differ[:most]:
        *parents, leaf = name.split("/")
        for depth, parent in enumerate(parents):
            if above[: depth + 1] != parents[: depth + 1]:
                lines.append("  " * (depth + 1) + parent)
        above = parents
        saved, wanted = there.get(name, "absent"), here.get(name, "absent")
        lines.append("  " * (len(parents) + 1) + f"{leaf}: {saved} there, {wanted} here")
    if len(differ) > most:
        lines.append(f"  and {len(differ) - most} more")
    return "\n".join(lines)
