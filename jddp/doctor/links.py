"""Checks the network: right sums, bandwidth of an all-reduce, slow hosts and links."""

import functools
import itertools
import json
import socket
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import Mesh

from jddp.distributed.coordination import gather
from jddp.doctor.finding import BAD, OK, WARN, Finding
from jddp.engine.mesh import AXIS, over_replicas, put_rows
from jddp.engine.processes import from_process_zero

SIZES = tuple(4 * 2**k for k in range(10, 25, 2))  # 4 KiB to 64 MiB
ROUNDS = 7
SLOW_SECONDS = 0.5  # above this no larger size is measured
LINK_SIZES = (2**10, 2**20)
SLOW_RATIO = 3.0  # a link is slow if it takes this many times as long as the others,
LATE_SECONDS = 2e-3  # and this much longer
_SECONDS = 120.0


class Exchange(NamedTuple):
    """The time of an all-reduce.

    Attributes:
      size: Bytes on each device.
      seconds: Median of several runs.
      bandwidth: Bytes per second into and out of each device: a ring moves 2 (N - 1) / N sizes.
    """

    size: int
    seconds: float
    bandwidth: float

    def __str__(self) -> str:
        """A row: size, time, bandwidth."""
        size = f"{self.size / 2**20:,.0f} MiB" if self.size >= 2**20 else f"{self.size >> 10} KiB"
        return f"{size:>10} {1e3 * self.seconds:10.3f} ms {self.bandwidth / 1e9:9.3f} GB/s"


def measure_all_reduce(
    mesh: Mesh, sizes: Sequence[int] = SIZES
) -> tuple[list[Exchange], list[Finding]]:
    """Times sums of whole numbers over all devices, and checks their results.

    Every process calls it. Whole numbers have one right sum, in any order.
    """
    total = mesh.size * (mesh.size - 1) // 2
    own = [i for i, device in enumerate(mesh.devices.flat) if device in mesh.local_devices]
    ranks = np.array(own, np.float32)[:, None]
    run = jax.jit(over_replicas(lambda x: lax.psum(x[0], AXIS), mesh, P(AXIS), P()))
    table = list[Exchange]()
    wrong = list[int]()
    for size in sizes:
        rows = put_rows(np.repeat(ranks, size // 4, axis=1), mesh)
        summed = np.asarray(run(rows).addressable_data(0))
        if (summed != total).any():
            wrong.append(size)
        seconds = _median_seconds(functools.partial(run, rows))
        moved = 2 * (mesh.size - 1) / mesh.size * size
        table.append(Exchange(size, seconds, moved / seconds))
        if from_process_zero(np.float64(seconds)) > SLOW_SECONDS:
            break
    if wrong:
        what = f"Sums of {', '.join(map(str, wrong))} bytes over the devices came out wrong."
        fix = "Exclude devices one by one (CUDA_VISIBLE_DEVICES, --nodelist) to find a faulty one."
        return table, [Finding(BAD, what, fix)]
    return table, [Finding(OK, f"sums over {mesh.size} devices are right, in {len(table)} sizes")]


def check_links(mesh: Mesh) -> Iterator[Finding]:
    """Names the host, or else the link, that takes much longer than the others.

    Every process calls it. Small and larger arrays go back and forth on a ring of hosts (of
    processes, if there is one host), between the first devices of both ends.
    """
    devices = reversed(list(enumerate(mesh.devices.flat)))
    places = {device.process_index: place for place, device in devices}  # the first of each
    hosts = gather("doctor/hosts", socket.gethostname(), timeout_seconds=_SECONDS)
    names = [f"process {i} on {host}" for i, host in enumerate(hosts)]
    members = sorted({hosts[i]: i for i in sorted(places, reverse=True)}.values())
    if len(members) == 1:
        members = sorted(places)
    ring = list(itertools.pairwise(members))
    if len(members) > 2:
        ring.append((members[-1], members[0]))
    for size in LINK_SIZES if ring else ():
        mine = [_seconds_between(mesh, places[a], places[b], size) for a, b in ring]
        shared = gather("doctor/links", json.dumps(mine), timeout_seconds=_SECONDS)
        times = {link: json.loads(shared[link[0]])[i] for i, link in enumerate(ring)}
        yield from compare_links(times, names, size)


def _seconds_between(mesh: Mesh, here: int, there: int, size: int) -> float:
    """Round trip of an array of `size` bytes, measured by the processes of both devices."""

    def replica() -> jax.Array:
        sent = jnp.ones(size // 4) * lax.axis_index(AXIS)
        arrived = lax.ppermute(sent, AXIS, [(here, there), (there, here)])
        return lax.ppermute(arrived, AXIS, [(here, there), (there, here)])

    run = jax.jit(over_replicas(replica, mesh, (), P(AXIS)))
    jax.block_until_ready(run())
    return _median_seconds(run)


def compare_links(
    times: Mapping[tuple[int, int], float], names: Sequence[str], size: int
) -> Iterator[Finding]:
    """Names the slow hosts and links.

    A host is slow if both of its links are slow, and its neighbours have a fast link.

    Args:
      times: Seconds of a round trip, by the processes at both ends.
      names: Names of all processes, by number.
      size: Bytes that were sent.
    """
    ends = sorted({end for link in times for end in link})
    nearest = {end: min(t for link, t in times.items() if end in link) for end in ends}
    usual = statistics.median(nearest.values())
    limit = max(SLOW_RATIO * usual, usual + LATE_SECONDS)
    slow = [end for end in ends if nearest[end] > limit]
    links = [link for link, t in times.items() if t > limit and not set(link) & set(slow)]
    found = {names[end]: nearest[end] for end in slow}
    found |= {f"the link from {names[a]} to {names[b]}": times[a, b] for a, b in links}
    for name, seconds in found.items():
        what = f"{name} takes {1e3 * seconds:.2f} ms for {size >> 10} KiB there and back, others "
        what += f"take {1e3 * usual:.2f} ms: every step waits for it."
        yield Finding(WARN, what, "Check its link, or exclude the host.")
    if not found:
        slowest = max(times.values())
        yield Finding(OK, f"{size >> 10} KiB there and back: {1e3 * slowest:.2f} ms at most")


def _median_seconds(run: Callable[[], object]) -> float:
    """The median time of a computation, without the first run, which may compile."""
    _, *seconds = timeit.repeat(lambda: jax.block_until_ready(run()), repeat=ROUNDS, number=1)
    return statistics.median(seconds)
