"""Compare states, bit by bit on every device or to tolerances."""

import jax
import jax.numpy as jnp
import numpy as np


def _shards(x):
    """What each device holds of an array; keys as their words, since they are not numbers."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def assert_same(got, want):
    """Equal structure, dtypes and shardings, and equal bits on every device."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding), where
        for one, other in zip(_shards(a), _shards(b), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=where)


def equal(got, want):
    """Equal numbers in every leaf, wherever they are."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def close(got, want, rtol=1e-5, atol=1e-6):
    """Every leaf to these tolerances; float32 sums of some ten numbers in another order."""

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)

    jax.tree.map(compare, jax.device_get(got), jax.device_get(want))


def copied(tree):
    """A copy that outlives the donation of the original, on the same devices."""
    return jax.tree.map(jnp.copy, tree)


def bent(array, device, place, mask):
    """The array, whose copy on one device of this process has the bits of a mask flipped."""
    copies = [np.array(shard.data) for shard in array.addressable_shards]
    copies[device].view(np.uint32).flat[place] ^= np.uint32(mask)
    placed = [
        jax.device_put(x, shard.device)
        for x, shard in zip(copies, array.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
