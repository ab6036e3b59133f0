"""The parts of arrays that each host of a job holds, and the process that writes each of them.

    for name, bounds, data in parts_to_write(arrays, hosts):   # of this process
        ...

`hosts` has the number of the host of each process. A host holds each part once, by the first of its
devices that has it. A part that no other host holds is sent to the next host, which holds a copy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from jddp.engine.calls import run_compiled
from jddp.engine.mesh import OnMesh, in_a_row, mesh_of, sender

Bounds = tuple[tuple[int, int], ...]  # Start and end of a part along each dim.
_Placement = dict[jax.Device, Bounds]


def placement(shape: Sequence[int], sharding: jax.sharding.Sharding) -> _Placement:
    """The part of an array that each device holds."""
    of_devices = sharding.devices_indices_map(tuple(shape))
    return {device: bounds_of(index, shape) for device, index in of_devices.items()}


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """The bounds of an index of JAX."""
    return tuple(along.indices(size)[:2] for along, size in zip(index, shape, strict=True))


def parts_to_write(
    arrays: Mapping[str, jax.Array], hosts: Sequence[int]
) -> Iterator[tuple[str, Bounds, jax.Array]]:
    """The parts that this process writes: their arrays, their bounds and their values.

    Args:
      arrays: Arrays by name, on one mesh; no keys of random numbers. All processes call.
      hosts: Host of each process.
    """
    places = {name: placement(x.shape, x.sharding) for name, x in arrays.items()}
    for name, x in arrays.items():
        for bounds, data in _held_first(x, places[name], hosts):
            yield name, bounds, data
    alone = {name: x for name, x in arrays.items() if is_on_one_host(places[name], hosts)}
    if not alone:
        return
    mesh = in_a_row(mesh_of(next(iter(alone.values()))))
    devices = [*mesh.devices.flat]
    distance = len(devices) // (max(hosts) + 1)
    before = {device: devices[i - distance] for i, device in enumerate(devices)}
    placed = tuple(x.sharding for x in alone.values())
    moved = run_compiled(sender(mesh, distance, placed), [*alone.values()])
    for name, x in zip(alone, moved, strict=True):
        copies = {device: places[name][before[device]] for device in devices}
        for bounds, data in _held_first(x, copies, hosts):
            yield name, bounds, data


def bytes_on_host(arrays: Mapping[str, OnMesh], hosts: Sequence[int]) -> int:
    """Bytes of the parts that are written on the host of this process."""
    here = hosts[jax.process_index()]
    total = 0
    for x in arrays.values():
        placed = placement(x.shape, x.sharding)
        held = {x for device, x in placed.items() if hosts[device.process_index] == here}
        num_copies = 1 + is_on_one_host(placed, hosts)
        total += num_copies * x.dtype.itemsize * sum(map(num_elements, held))
    return total


def is_on_one_host(placed: _Placement, hosts: Sequence[int]) -> bool:
    """Whether each part is on one host alone, and there are others."""
    pairs = {(bounds, hosts[device.process_index]) for device, bounds in placed.items()}
    return max(hosts) > 0 and len(pairs) == len({*placed.values()})


def num_elements(bounds: Bounds) -> int:
    """Number of elements of a part."""
    return math.prod(stop - start for start, stop in bounds)


def overlap(one: Bounds, other: Bounds) -> bool:
    """Whether two parts of an array have elements in common."""
    pairs = zip(one, other, strict=True)
    return all(start < end and begin < stop for (start, stop), (begin, end) in pairs)


def _held_first(
    x: jax.Array, placed: _Placement, hosts: Sequence[int]
) -> Iterator[tuple[Bounds, jax.Array]]:
    """The parts of which a device of this process is the first one of its host."""
    here = hosts[jax.process_index()]
    first: dict[Bounds, jax.Device] = {}
    for device in sorted(placed, key=lambda device: device.id):
        if hosts[device.process_index] == here:
            first.setdefault(placed[device], device)
    for shard in x.addressable_shards:
        if first[bounds := placed[shard.device]] == shard.device:
            yield bounds, shard.data
