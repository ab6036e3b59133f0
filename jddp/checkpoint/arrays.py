"""Describes a checkpoint's arrays: shape, dtype, digest and layout of each, by path.

    describe_arrays(tree, found, layouts)  # {"params/Dense_0/kernel": {"shape": [16, 4], ...}}

In the file a layout is "replicated", {"per_replica": "mean"} (or "sum", "reset": its rule for
another number of replicas) or {"sharded": [16, 4]} (the whole shape).
"""

import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jddp.distributed.coordination import num_processes
from jddp.engine.digest import as_words, digests
from jddp.engine.state import Divided, Layout, PerReplica, Replicated, Sharded, by_path
from jddp.ground.errors import ConfigError, printable
from jddp.ground.typing import JsonObject, Leaf, PyTree, Settings

Layouts = Mapping[str, Layout]  # by path
Described = dict[str, JsonObject]
# Implementations of PRNG keys, by the names of their dtypes.
KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
KINDS = [x.dtype for x in vars(jnp).values() if isinstance(getattr(x, "dtype", None), np.dtype)]
DTYPES = {str(dtype): dtype for dtype in KINDS}
MOST_DIMS = 32
MOST_REPLICAS = 2**20


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


def check_names(tree: PyTree) -> None:
    """Refuses a state whose checkpoint would look like a forged one.

    Raises:
      ConfigError: If the path of an array leads out of its folder, or cannot be printed.
    """
    if odd := [name for name in by_path(tree) if not _is_name(name)]:
        raise ConfigError(
            f"an array of the state has the path {odd[0]!r}, which a checkpoint cannot store. Give "
            "it another name."
        )


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
      ValueError: If they do not describe arrays, or arrays larger than the memory of all hosts.
    """
    described = {name: _entry(name, about) for name, about in entries.items()}
    forms = map(_stored_form, described.values())
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * num_processes()
    if size > memory:
        raise ValueError(f"they would need {size:.3g} bytes, but the memory has {memory:.3g}")
    return described


def _entry(name: str, about: Any) -> JsonObject:
    match about:
        case {"shape": [*dims], "dtype": str(dtype), "digest": str(), **rest} if (
            _is_name(name) and _is_shape(dims) and (dtype in DTYPES or dtype in KEY_IMPLS)
        ):
            return {**about, "layout": _layout_of(rest.get("layout"), dims)}
    raise ValueError(f"{reprlib.repr(name)} is {reprlib.repr(about)}")


def find_unlike(described: Described, stored: Mapping[str, Leaf]) -> str | None:
    """Names an array whose stored shape or dtype differs from its description; None if none does.

    Args:
      described: The description of a checkpoint's arrays.
      stored: Shapes and dtypes by path, as orbax knows them; it stores no empty arrays.
    """
    forms = {name: _stored_form(about) for name, about in described.items()}
    wanted = {name: form for name, form in forms.items() if 0 not in form[0]}
    found = {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in stored.items()}
    differ = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    return f"{reprlib.repr(differ[0])} is not the array that is stored" if differ else None


def _stored_form(about: Settings) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array in a checkpoint, where keys are numbers."""
    shape = tuple(about["shape"])
    dtype = about["dtype"]
    if dtype not in KEY_IMPLS:
        return shape, DTYPES[dtype]
    words = jax.random.key_data(jax.random.key(0, impl=KEY_IMPLS[dtype]))
    return shape + words.shape, words.dtype


def _layout_of(words: object, shape: Sequence[int]) -> Layout:
    """The layout of an array, from JSON.

    Raises:
      ValueError: If no array of this shape has such a layout.
    """
    match words:
        case "replicated":
            return Replicated()
        case {"per_replica": "mean" | "sum" | "reset" as rule} if any(shape[:1]):
            return PerReplica(rule)
        case {"sharded": [*whole]} if _is_shape(whole):
            if 0 <= math.prod(shape) - math.prod(whole) < MOST_REPLICAS:  # its padding
                return Sharded(tuple(whole))
    raise ValueError(f"{reprlib.repr(words)} is no layout of shape {reprlib.repr(shape)}")


def _is_shape(dims: Sequence[object]) -> bool:
    is_array = len(dims) <= MOST_DIMS
    return is_array and all(type(dim) is int and 0 <= dim < 2**63 for dim in dims)


def _is_name(name: str) -> bool:
    """Whether an array may have this path: it stays in its folder, and is printable."""
    parts = name.split("/")
    return printable(name) == name and parts[0] != "" and not {".", ".."} & {*parts}


def as_saved(words: Leaf, dtype: str) -> Leaf:
    """An array of a dtype named as by `describe_arrays`, from the numbers in a file."""
    impl = KEY_IMPLS.get(dtype)
    return words if impl is None else jax.random.wrap_key_data(words, impl=impl)
