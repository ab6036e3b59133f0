"""Describes a checkpoint's arrays: shape, dtype, digest and layout of each, by path.

    describe_arrays(tree, found, layouts)  # {"params/Dense_0/kernel": {"shape": [16, 4], ...}}

In the file a layout is "replicated", {"per_replica": "mean"} (or "sum", "reset": its rule for
another number of replicas) or {"sharded": [16, 4]} (the whole shape).
"""

import reprlib
from collections.abc import Mapping

import jax

from jddp.engine.digest import as_words, digests
from jddp.engine.state import Divided, Layout, PerReplica, Replicated, Sharded, by_path
from jddp.ground.typing import JsonObject, Leaf, PyTree, Settings

Layouts = Mapping[str, Layout]  # by path
Described = dict[str, JsonObject]
# Implementations of PRNG keys, by the names of their dtypes.
KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def describe_arrays(tree: PyTree, found: PyTree, layouts: Layouts) -> Described:
    """Describes every array.

    Args:
      tree: Arrays, or their shapes and shardings.
      found: Digests from `jddp.engine.digest`.
      layouts: Layouts by path.
    """
    words = as_words(found, tree)
    return {
        name: dict(shape=[*x.shape], dtype=str(x.dtype), digest=word, layout=layouts[name])
        for (name, x), word in zip(by_path(tree).items(), words, strict=True)
    }


def find_altered(arrays: PyTree, described: Described) -> str | None:
    """Names an array on the devices that differs from its description; None if none does."""
    found = describe_arrays(arrays, digests(arrays), layouts_in(described))
    differ = [name for name in {**described, **found} if described.get(name) != found.get(name)]
    return f"{differ[0]} is not the array that was saved" if differ else None


def layouts_in(described: Described) -> Layouts:
    """The layouts that a checkpoint has recorded."""
    return {name: about["layout"] for name, about in described.items()}


def in_file(layout: Layout) -> object:
    """A layout as JSON."""
    match layout:
        case PerReplica(rule):
            return {"per_replica": rule}
        case Sharded(whole):
            return {"sharded": whole}
        # A divided array has the shape of a single device's: it is read in any layout.
        case Replicated() | Divided():
            return "replicated"
    raise TypeError(f"{layout} is no layout")


def from_file(entries: Settings) -> Described:
    """The entries of the file with their layouts.

    Raises:
      LookupError: If an entry lacks its layout.
      TypeError: If it is no entry.
      ValueError: If a layout is unknown.
    """
    return {
        name: {**about, "layout": _layout_of(about["layout"])} for name, about in entries.items()
    }


def _layout_of(words: object) -> Layout:
    match words:
        case "replicated":
            return Replicated()
        case {"per_replica": "mean" | "sum" | "reset" as rule}:
            return PerReplica(rule)
        case {"sharded": [*whole]}:
            return Sharded(tuple(whole))
    raise ValueError(f"{reprlib.repr(words)} is no layout")


def as_saved(words: Leaf, dtype: str) -> Leaf:
    """An array of a dtype named as by `describe_arrays`, from the numbers in a file."""
    impl = KEY_IMPLS.get(dtype)
    return words if impl is None else jax.random.wrap_key_data(words, impl=impl)
