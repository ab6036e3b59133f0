"""A digest of every array, computed where it lies, and exact in any order of addition.

    found = digests(state)                # uint32 (replicas, leaves), the same on every process
    words = as_words(found, state)        # one for each leaf of a replicated state

Every word of an array is mixed with its place, and the mixed words are added up modulo 2^32. For
one place the mix is one-to-one: a change of one element always shows, any other change is missed
with a probability of 2^-32. Replicas of one array have equal digests. The digests of the shards of
a split array add up to the digest of the whole array, on any number of devices; if there are
several copies, the digests of each copy do.
"""

import functools
import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jddp.distributed.coordination import computing
from jddp.engine.mesh import axis_of, in_a_row, num_parts, over_replicas
from jddp.engine.state import name_of
from jddp.ground.errors import UsageError
from jddp.ground.typing import PyTree

SMALL = 2**14  # Maximum number of elements of a small leaf.
# XLA:CPU would write all mixed words into memory, and add them up in several kernels, which take
# most of the time of compiling. Other hardware has no such pass.
_OPTIONS = {"xla_disable_hlo_passes": "tree_reduction_rewriter"}
Found = Array | np.ndarray  # Result of `digests`.


def digests(tree: PyTree) -> UInt32[Array, "replicas leaves"]:
    """Digests of each array, one for each device of the mesh, from the part that it holds.

    Args:
      tree: Arrays on one mesh, replicated or split along one dim; at least one.

    Raises:
      UsageError: If a step has taken their memory.
    """
    leaves = jax.tree.leaves(tree)
    if any(x.is_deleted() for x in leaves):  # JAX would crash.
        raise UsageError("This state was given to a step, which reused its memory.")
    placed = tuple(x.sharding for x in leaves)
    with computing(leaves):
        return _on(in_a_row(placed[0].mesh), placed)(leaves)


def as_words(found: Found, tree: PyTree) -> list[str]:
    """The digest of each leaf, as eight hexadecimal digits.

    Args:
      found: Result of `digests`.
      tree: The digested arrays, or their shapes and shardings.
    """
    leaves, rows = jax.tree.leaves(tree), np.asarray(found)
    return [
        f"{rows[: num_parts(x.sharding), i].sum(dtype=np.uint32):08x}" for i, x in enumerate(leaves)
    ]


def find_divergence(found: Found, tree: PyTree) -> str | None:
    """Names an array that is not the same on all replicas, and the minority in which it differs.

    Of two halves, the one without replica 0 is named.

    Args:
      found: Result of `digests`.
      tree: The digested arrays, or their shapes and shardings.
    """
    rows = np.asarray(found)
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        copies = [tuple(copy) for copy in rows[:, i].reshape(-1, num_parts(x.sharding)).tolist()]
        if len({*copies}) == 1:
            continue
        most = max(copies, key=copies.count)  # the first one in a tie
        others = np.flatnonzero(np.array(copies) != most).tolist()
        devices = x.sharding.mesh.devices.flat
        where = ", ".join(f"{n} (process {devices[n].process_index})" for n in others)
        return f"{name_of(path)} differs on replica {where}"
    return None


@functools.cache
def _on(
    mesh: jax.sharding.Mesh, placed: Sequence[jax.sharding.NamedSharding]
) -> jax.stages.Wrapped:
    def on_replica(leaves: list[Array]) -> UInt32[Array, "replicas leaves"]:
        replica = jax.lax.axis_index(axis_of(mesh))
        found, groups = [], _alike(leaves, placed)
        for group in groups:
            sharding = placed[group[0]]
            dim = next((i for i, name in enumerate(sharding.spec) if name is not None), None)
            num = num_parts(sharding)
            digest = functools.partial(_digest, dim=dim or 0, num=num)
            part = 0 if num == 1 else replica % num
            if len(group) == 1:
                found.append(digest(leaves[group[0]], part)[None])
            else:
                alike = jnp.stack([leaves[i] for i in group])
                found.append(jax.vmap(digest, in_axes=(0, None))(alike, part))
        places = np.argsort(np.concatenate(groups))
        # Every process gets all digests: each must find a mismatch by itself, and name the replica.
        return jax.lax.all_gather(jnp.concatenate(found)[places], axis_of(mesh))

    function = over_replicas(on_replica, mesh, (list(placed),), jax.P())
    return jax.jit(function, compiler_options=_OPTIONS)


def _alike(leaves: list[Array], placed: Sequence[jax.sharding.NamedSharding]) -> list[list[int]]:
    """Indices of small leaves of equal shape, whose digests are computed together."""
    # XLA takes long to compile separate operations for each of many scalars. A large leaf stays
    # alone, since it would be copied: large leaves of one shape call one function.
    groups: dict[Hashable, list[int]] = {}
    for i, (x, sharding) in enumerate(zip(leaves, placed, strict=True)):
        alone = i if x.size > SMALL else None
        groups.setdefault((x.shape, x.dtype, sharding, alone), []).append(i)
    return list(groups.values())


# Traced and lowered once for each shape.
@functools.partial(jax.jit, static_argnames=("dim", "num"))
def _digest(x: Array, part: int | Array, *, dim: int, num: int) -> UInt32[Array, ""]:
    """The digest of a device's part of an array, number `part` of `num` along a dim."""
    words = _words(x)
    place = jax.lax.iota(jnp.uint32, words.size)
    # Number of words of this part that are contiguous in the whole array: all words with the same
    # index along the dims before the divided one.
    run = np.uint32(max(words.size // max(math.prod(x.shape[:dim]), 1), 1))
    place += run * jnp.asarray(part).astype(jnp.uint32)
    if dim:
        place += (jax.lax.iota(jnp.uint32, words.size) // run) * run * np.uint32(num - 1)
    # The place is mixed in, or the sum would not change when two elements change places. All that
    # follows is one-to-one: xor-shifts and products with odd numbers, as MurmurHash3 ends.
    mixed = words * np.uint32(0x9E3779B1) + place * np.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x7FEB352D)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x846CA68B)
    # Addition modulo 2^32 is exact in any order, so the sum over shards equals the sum over
    # the whole; a floating sum, or a chained hash such as SHA-256, would depend on how an array is
    # cut.
    return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, "words"]:
    """The bits of an array in words of 32; an element that is narrower has a word of its own."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    elif jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    elif _num_bits(x.dtype) < 8:
        x = x.astype(jnp.float32)  # float32 holds each of the few numbers.
    # Bits, and not values: -0 equals 0, and NaN does not equal itself.
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(32, _num_bits(x.dtype))}"))
    return bits.reshape(-1).astype(jnp.uint32)


def _num_bits(dtype: np.dtype) -> int:
    if dtype == jnp.bool_:
        return 1
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return int(info(dtype).bits)
