"""Is what devices send right, how fast is it, and which host is slow."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import Mesh

from jddp.checkup.finding import BAD, OK, WARN, Finding
from jddp.mesh import AXIS, from_process_zero, put_rows
from jddp.step import over_replicas

SIZES = tuple(4 * 2**k for k in range(10, 25, 2))  # 4 KiB to 64 MiB
ROUNDS = 7
SLOW_SECONDS = 0.5  # where sizes end
APART = 3.0  # a link that takes so many times as long as the others is told,
LATE_SECONDS = 2e-3  # if it takes that much more


@dataclass(frozen=True)
class Exchange:
    """An all-reduce that was timed.

    Attributes:
      size: Bytes on each device.
      seconds: The median of several.
      bandwidth: Bytes a second into and out of each device, of the 2 (N - 1) / N that a ring moves.
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
    """Times sums of whole numbers over all devices, and holds them to what they must be.

    Every process calls it. Whole numbers have one right sum, in whatever order.
    """
    total = mesh.size * (mesh.size - 1) // 2
    table: list[Exchange] = []
    wrong: list[int] = []
    for size in sizes:
        rows = put_rows(np.repeat(_own_ranks(mesh), size // 4, axis=1), mesh)
        run = jax.jit(over_replicas(lambda x: lax.psum(x[0], AXIS), mesh, P(AXIS), P()))
        summed = np.asarray(run(rows).addressable_data(0))
        wrong += [size] * bool((summed != total).any())
        seconds = _median(functools.partial(run, rows))
        moved = 2 * (mesh.size - 1) / mesh.size * size
        table.append(Exchange(size, seconds, moved / seconds))
        if from_process_zero(np.float64(seconds)) > SLOW_SECONDS:
            break  # larger ones tell no more
    if wrong:
        return table, [
            Finding(
                BAD,
                f"Sums of {', '.join(map(str, wrong))} bytes over the devices came out wrong.",
                "Leave out devices one by one (CUDA_VISIBLE_DEVICES, --nodelist) to find which.",
            )
        ]
    return table, [Finding(OK, f"sums over {mesh.size} devices are right, in {len(table)} sizes")]


def _own_ranks(mesh: Mesh) -> np.ndarray:
    """The numbers of this process's devices on the mesh, a row each."""
    own = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    return np.array(own, np.float32)[:, None]


def check_links(mesh: Mesh) -> Iterator[Finding]:
    """Names the process whose way to process 0 takes longest, if it stands out.

    Every process calls it: a small array goes back and forth between the first devices of both.
    """
    firsts: dict[int, int] = {}
    for place, device in enumerate(mesh.devices.flat):
        firsts.setdefault(device.process_index, place)
    times = {}
    for process, place in sorted(firsts.items())[1:]:
        pair = [(firsts[0], place), (place, firsts[0])]

        def replica(pair: Any = pair) -> Any:
            there = lax.ppermute(jnp.ones(256) * lax.axis_index(AXIS), AXIS, pair)
            return lax.ppermute(there, AXIS, pair)

        run = jax.jit(over_replicas(replica, mesh, (), P(AXIS)))
        jax.block_until_ready(run())
        times[process] = _median(run)
    yield from compare_links(times)


def compare_links(times: dict[int, float]) -> Iterator[Finding]:
    """Which link stands out.

    Args:
      times: Seconds there and back, by process.
    """
    if not times:
        return
    slowest = max(times, key=times.__getitem__)
    others = [seconds for process, seconds in times.items() if process != slowest]
    told = f"process {slowest} takes {1e3 * times[slowest]:.2f} ms there and back"
    usual = statistics.median(others) if others else times[slowest]
    if times[slowest] > max(APART * usual, usual + LATE_SECONDS):
        yield Finding(
            WARN,
            f"{told}, the others {1e3 * usual:.2f} ms: every step waits for it.",
            "Look at its host's link, or leave the host out.",
        )
    else:
        yield Finding(OK, f"the slowest link: {told}")


def _median(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first may still warm up
