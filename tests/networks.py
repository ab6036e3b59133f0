"""How long collectives take between H100s, from measurements that others have published."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jddp.ground.typing import MEBIBYTE
from jddp.workbench.links import ALL_REDUCE, SHARES


@dataclass(frozen=True)
class Network:
    """Times of an all-reduce by payload: a power of the bytes between two of them."""

    name: str
    times: tuple[tuple[int, float], ...]
    devices_per_host: int | None = None
    slowness: float = 1.0

    def seconds(self, num_bytes: float, op: str = ALL_REDUCE) -> float:
        """The time of one collective of `num_bytes` on each device."""
        return self.slowness * SHARES[op] * self._all_reduce(num_bytes)

    def _all_reduce(self, num_bytes: float) -> float:
        sizes, times = zip(*self.times, strict=True)
        if num_bytes <= sizes[0]:
            return times[0]
        if num_bytes >= sizes[-1]:
            return times[-1] * num_bytes / sizes[-1]
        right = bisect.bisect(sizes, num_bytes)
        share = math.log(num_bytes / sizes[right - 1]) / math.log(sizes[right] / sizes[right - 1])
        return times[right - 1] * (times[right] / times[right - 1]) ** share

    def slower(self, factor: float) -> "Network":
        """The same network, taking `factor` times as long for everything."""
        name = f"{self.name}, {factor:g}x slower"
        return replace(self, name=name, slowness=factor * self.slowness)

    def among(self, devices: Sequence[int]) -> "Network":
        """The network among some of its devices, as many of each host, or of all for ()."""
        if not devices or self.devices_per_host is None:
            return self
        num_hosts = len({device // self.devices_per_host for device in devices})
        sizes = {"num_hosts": num_hosts, "devices_per_host": len(devices) // num_hosts}
        return replace(make_network(**sizes), slowness=self.slowness)


# Seconds of the smallest all-reduce and bus bandwidths (GB/s by MiB), as `nccl-tests` reports them.
# Within a host: eight H200, whose links are those of H100 (NVLink 4, NVSwitch).
# https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/README.md
_WITHIN_SECONDS = 18e-6
_WITHIN = {1: 72, 4: 140, 8: 182, 16: 242, 32: 298, 64: 370, 128: 411, 256: 442, 1024: 464}
# Between hosts: two H100, one on each of two hosts, each with a network adapter of 400 Gb/s.
# https://github.com/NVIDIA/nccl/issues/1357. The smallest takes 47 us on two hosts in all.
# https://github.com/NVIDIA/nccl/issues/1244
_BETWEEN_SECONDS = 47e-6 - _WITHIN_SECONDS
_BETWEEN = {2: 18.5, 4: 27.2, 8: 36.2, 16: 39.9, 32: 41.3}


def make_network(*, num_hosts: int = 1, devices_per_host: int = 8) -> Network:
    """NVLink within a host; between hosts 400 Gb/s for each GPU, one part after the other."""
    name = f"{num_hosts} x {devices_per_host} GPUs"
    within = _ring(name, _WITHIN_SECONDS, _WITHIN, num_members=devices_per_host)
    if num_hosts == 1:
        return replace(within, devices_per_host=devices_per_host)
    between = _ring(name, _BETWEEN_SECONDS, _BETWEEN, num_members=num_hosts)
    times = {
        num_bytes: seconds + between.seconds(num_bytes / devices_per_host)
        for num_bytes, seconds in within.times
    }
    return Network(name, tuple(times.items()), devices_per_host)


def _ring(
    name: str, smallest_seconds: float, bandwidths: Mapping[int, float], *, num_members: int
) -> Network:
    """Times from bus bandwidths: what each member sends, 2 (n - 1) / n of the payload, by time."""
    sent = 2 * (num_members - 1) / num_members
    times = [(32 * 1024, smallest_seconds)]
    for mebibytes, gigabytes_per_second in bandwidths.items():
        num_bytes = mebibytes * MEBIBYTE
        seconds = num_bytes * sent / (gigabytes_per_second * 1e9)
        times.append((num_bytes, max(smallest_seconds, seconds)))
    return Network(name, tuple(times))
