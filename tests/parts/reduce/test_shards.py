"""Arrays that owners have whole for a moment, of which each replica has a part."""

import jax
import numpy as np
import pytest
from jax import P

from jddp.reduce.shards import AlongDim, Flat, Groups

# Shapes, whether slices are sent, and of how many arrays. Twelve slices on three and on eight
# replicas; sizes that replicas divide and do not; fewer arrays than replicas, and more.
CASES = [
    ((4, 3), False, 5),
    ((8, 8), False, 3),
    ((3,), False, 9),
    ((12, 4, 6), True, 1),
    ((5, 2, 3), True, 1),
    ((16, 4, 2), True, 1),
    ((20, 3, 24), True, 1),
    ((7, 7, 5), True, 1),
]


@pytest.mark.parametrize("num", [1, 3, 8])
@pytest.mark.parametrize("division", [Flat, AlongDim])
def test_owners_get_whole_arrays_and_send_their_parts_back(division, num):
    mesh = jax.make_mesh((num,), ("data",), devices=jax.devices()[:num])
    divided = Flat("data", num) if division is Flat else AlongDim("data", Groups(num))

    def replica(arrays):
        stacks, parts = [], []
        for (shape, sliced, _), group in zip(CASES, arrays, strict=True):
            own = [divided.own(x) for x in group]
            assert {x.shape for x in own} == {divided.part_shape(shape)}
            stacks.append(divided.to_owners(own, shape, sliced=sliced))
            back = divided.from_owners(stacks[-1], len(group), shape, sliced=sliced)
            parts.append([divided.whole(x, shape) for x in back])
        return stacks, parts

    rng = np.random.default_rng(0)
    arrays = [
        [rng.normal(size=shape).astype(np.float32) for _ in range(num_arrays)]
        for shape, _, num_arrays in CASES
    ]
    mapped = jax.shard_map(
        replica, mesh=mesh, in_specs=P(), out_specs=(P("data"), P()), check_vma=False
    )
    stacks, parts = jax.device_get(jax.jit(mapped)(arrays))
    jax.tree.map(np.testing.assert_array_equal, parts, arrays)
    for (_, sliced, _), stack, group in zip(CASES, stacks, arrays, strict=True):
        want = group[0][:, None] if sliced else np.stack(group)
        np.testing.assert_array_equal(stack[: len(want)], want)
        # Each replica owns as many, of which the last are of zeros.
        assert len(stack) - len(want) < num
        assert not np.any(stack[len(want) :])
