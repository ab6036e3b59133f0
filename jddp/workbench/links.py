"""How long collectives take over links of known bandwidth and latency, by ring, tree or hierarchy.

    fabric = Fabric(8, 8, with_links(HOPPER, ["nic=25GB/s,14us"]))     # 8 hosts of 8 GPUs
    fabric.best(25 * 2**20)                          # the fastest algorithm for 25 MiB, its seconds

NCCL chooses by the same kind of arithmetic, and most figures are of its tables. Not modelled are
reductions inside of switches (NVLS, SHARP), which are faster, and networks that several use.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jddp.ground.errors import ConfigError
from jddp.ground.names import did_you_mean

ALL_REDUCE, PERMUTE = "all-reduce", "collective-permute"
# Shares of an all-reduce's time: a ring does a reduce-scatter and then an all-gather.
SHARES = {
    ALL_REDUCE: 1.0,
    "reduce-scatter": 0.5,
    "all-gather": 0.5,
    "all-to-all": 0.5,
    PERMUTE: 1.0,  # All bytes go to one device, as in an all-reduce between two.
}


@dataclass(frozen=True)
class Link:
    """A kind of link between GPUs.

    Attributes:
      bytes_per_second: Bandwidth of one GPU in one direction.
      hop_seconds: Latency of one hop of a collective.
      source: Origin of both figures.
    """

    bytes_per_second: float
    hop_seconds: float
    source: str


# Latencies of NCCL's protocols Simple and LL come from https://github.com/NVIDIA/nccl, file
# src/graph/tuning.cc. LL sends a flag with each word: it waits less and carries less, on Hopper
# 141 GB/s in a host and 45 between two hosts, here of eight GPUs; on Ampere 87.7 and 22.5.
LOW_LATENCY = "_ll"
# Time of a ring before its first hop, by protocol.
START_SECONDS = {"": 8.4e-6, LOW_LATENCY: 6.6e-6}
HOPPER = {
    "nvlink": Link(450e9, 3.4e-6, "NVLink 4, data sheet; NCCL, Simple"),
    "nvlink_ll": Link(141e9, 0.6e-6, "NCCL, LL"),
    "nic": Link(50e9, 14e-6, "400 Gb/s for each GPU; NCCL, Simple"),
    "nic_ll": Link(5.6e9, 2.7e-6, "NCCL, LL"),
}
AMPERE = {
    "nvlink": Link(300e9, 3.4e-6, "NVLink 3, data sheet; NCCL, Simple"),
    "nvlink_ll": Link(87.7e9, 0.6e-6, "NCCL, LL"),
    "nic": Link(25e9, 14e-6, "200 Gb/s for each GPU; NCCL, Simple"),
    "nic_ll": Link(2.8e9, 2.7e-6, "NCCL, LL"),
}

_NUMBER = r"(\d+\.?\d*|\.\d+)"
_LINK = re.compile(rf"\w+={_NUMBER} ?([GMT]?)(B|b)/s, ?{_NUMBER} ?([mun]?)s")
_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def with_links(links: Mapping[str, Link], replaced: Sequence[str]) -> dict[str, Link]:
    """Replaces links by others, given as "NAME=BANDWIDTH,LATENCY", such as "nic=50GB/s,5us".

    Raises:
      ConfigError: If a text is no link, or its name is unknown.
    """
    return {**links, **dict(_read_link(text, links) for text in replaced)}


def _read_link(text: str, known: Mapping[str, Link]) -> tuple[str, Link]:
    name = text.partition("=")[0]
    if name not in known:
        meant = did_you_mean(name, known.keys())
        raise ConfigError(f"Link {name!r} is unknown.{meant} Known: {', '.join(known)}.")
    found = _LINK.fullmatch(text)
    if not found or not float(found[1]):
        raise ConfigError(
            f"Link {text!r} is not NAME=BANDWIDTH,LATENCY with a bandwidth above 0: for example "
            f"{name}=50GB/s,5us."
        )
    rate, scale, unit, latency, fraction = found.groups()
    bandwidth = float(rate) * _SCALES[scale] / (8 if unit == "b" else 1)
    return name, Link(bandwidth, float(latency) * _SCALES[fraction], "given")


@dataclass(frozen=True)
class Choice:
    """An algorithm for one collective.

    Attributes:
      algorithm: "ring", "tree", "hierarchical" or "send"; with " LL" in the low-latency protocol.
      seconds: Time that it takes.
      bytes_per_second: Bandwidth that was assumed, of the slowest link on its way.
      hops: Number of hops, one after the other.
      sent_bytes: Bytes that each GPU sends, on average.
      host_bytes: Bytes that each host sends to other hosts, on average; of a send, at most.
    """

    algorithm: str
    seconds: float
    bytes_per_second: float
    hops: int
    sent_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class Fabric:
    """Hosts of GPUs: NVLink between all GPUs of a host, and an adapter of each to other hosts.

    Attributes:
      num_hosts: Hosts.
      devices_per_host: GPUs of each.
      links: Links by their names, as in `HOPPER`.
      num_stretched: Hosts for each one that the program was compiled for. Groups of GPUs that
        reach over all of its hosts are then over as many times more; smaller ones stay as they are.
    """

    num_hosts: int
    devices_per_host: int
    links: Mapping[str, Link]
    num_stretched: int = 1

    @property
    def num_devices(self) -> int:
        """GPUs of all hosts."""
        return self.num_hosts * self.devices_per_host

    def among(self, devices: Sequence[int]) -> "Fabric":
        """The fabric among GPUs of the program, equally many of each host; () means all GPUs."""
        if not devices:
            return self
        hosts = sorted({device // self.devices_per_host for device in devices})
        distance = hosts[1] - hosts[0] if len(hosts) > 1 else 0
        # Whether the collective spans all hosts rather than one group.
        reaches_all = len(hosts) * distance >= self.num_hosts // self.num_stretched
        num_stretched = self.num_stretched if reaches_all else 1
        return Fabric(len(hosts) * num_stretched, len(devices) // len(hosts), self.links)

    def sent(self, num_bytes: float, op: str = ALL_REDUCE) -> float:
        """Bytes that each GPU sends for a collective of `num_bytes`, whatever the algorithm."""
        if op == PERMUTE:
            return num_bytes
        return 2 * SHARES[op] * num_bytes * (self.num_devices - 1) / self.num_devices

    def seconds(self, num_bytes: float, op: str = ALL_REDUCE) -> float:
        """The time of one collective of `num_bytes` on each device."""
        return self.best(num_bytes, op).seconds

    def best(self, num_bytes: float, op: str = ALL_REDUCE) -> Choice:
        """The fastest algorithm; other collectives than all-reduces are rings, or sends."""
        choices = (x for protocol in START_SECONDS for x in self.choices(num_bytes, op, protocol))
        return min(choices, key=lambda choice: choice.seconds)

    def choices(
        self, num_bytes: float, op: str = ALL_REDUCE, protocol: str = ""
    ) -> Iterator[Choice]:
        """Yields each algorithm of a collective in one protocol."""
        if op == PERMUTE:
            yield self._send(num_bytes, protocol)
            return
        yield self._ring(num_bytes, op, protocol)
        if op == ALL_REDUCE and self.num_hosts > 1 and self.devices_per_host > 1:
            yield self._tree(num_bytes, protocol)
            yield self._hierarchical(num_bytes, protocol)

    def _send(self, num_bytes: float, protocol: str) -> Choice:
        """Each GPU sends to one other, between hosts along its own adapter."""
        between = self.num_hosts > 1
        link = self.links[("nic" if between else "nvlink") + protocol]
        seconds = START_SECONDS[protocol] + link.hop_seconds + num_bytes / link.bytes_per_second
        left = self.devices_per_host * num_bytes if between else 0.0
        return Choice(_named("send", protocol), seconds, link.bytes_per_second, 1, num_bytes, left)

    def _ring(self, num_bytes: float, op: str, protocol: str) -> Choice:
        """Each part goes around all GPUs, along every adapter of a host at once."""
        laps = round(2 * SHARES[op])
        hops = laps * (self.num_devices - 1)
        outside = min(hops, laps * self.num_hosts) if self.num_hosts > 1 else 0
        rate = self._rate(protocol)
        sent = self.sent(num_bytes, op)
        seconds = self._hops(hops - outside, outside, protocol) + sent / rate
        left = sent if self.num_hosts > 1 else 0.0
        return Choice(_named("ring", protocol), seconds, rate, hops, sent, left)

    def _tree(self, num_bytes: float, protocol: str) -> Choice:
        """Sums go up a binary tree of hosts, and down; in a host they pass along a chain."""
        rate = self._rate(protocol)
        inside, outside = self.devices_per_host - 1, math.ceil(math.log2(self.num_hosts))
        seconds = self._hops(2 * inside, 2 * outside, protocol) + 2 * num_bytes / rate
        hops, sent = 2 * (inside + outside), self.sent(num_bytes)
        left = 2 * num_bytes * (self.num_hosts - 1) / self.num_hosts
        return Choice(_named("tree", protocol), seconds, rate, hops, sent, left)

    def _hierarchical(self, num_bytes: float, protocol: str) -> Choice:
        """Scattered in each host, reduced between hosts by each GPU for its part, and gathered."""
        within = Fabric(1, self.devices_per_host, self.links)._ring(num_bytes, ALL_REDUCE, protocol)
        part = num_bytes / self.devices_per_host
        between = Fabric(self.num_hosts, 1, self.links)._ring(part, ALL_REDUCE, protocol)
        # An all-reduce in a host takes as long as its two halves, but each half has its own start.
        seconds = within.seconds + START_SECONDS[protocol] + between.seconds
        rate = min(within.bytes_per_second, self.devices_per_host * between.bytes_per_second)
        hops, sent = within.hops + between.hops, within.sent_bytes + between.sent_bytes
        left = self.devices_per_host * between.host_bytes
        return Choice(_named("hierarchical", protocol), seconds, rate, hops, sent, left)

    def _hops(self, inside: float, outside: float, protocol: str) -> float:
        """The time of the start and of all hops, in hosts and between hosts."""
        nvlink, nic = self.links["nvlink" + protocol], self.links["nic" + protocol]
        return START_SECONDS[protocol] + inside * nvlink.hop_seconds + outside * nic.hop_seconds

    def _rate(self, protocol: str) -> float:
        """Bandwidth around all GPUs: of NVLink, or of all adapters of a host if they have less."""
        nvlink, nic = self.links["nvlink" + protocol], self.links["nic" + protocol]
        rates = [nvlink.bytes_per_second] if self.devices_per_host > 1 else []
        if self.num_hosts > 1:
            rates.append(self.devices_per_host * nic.bytes_per_second)
        return min(rates, default=nvlink.bytes_per_second)


def _named(algorithm: str, protocol: str) -> str:
    return algorithm + (" LL" if protocol else "")
