"""Holds predicted scaling against points that others have published.

    python benchmarks/predictions.py
    python benchmarks/predictions.py --points mine.toml      # yours, of the same form

published_scaling.toml has the points with their sources. Nothing is fitted: the time of a step on
one GPU is the published one; two thirds of it are the backward pass, divided over layers by their
FLOPs; gradients are float32, in buckets as that software makes them; and the time of an all-reduce
is what `jddp explain` assumes, from data sheets and latencies of NCCL
(jddp/workbench/links.py). A bucket leaves when its last gradient is there and the bucket
before it is done; the step ends with its last bucket.

Errors are in points of efficiency, predicted minus published. Effects that are not modelled make
them positive: reading data, slow replicas, kernels that a collective slows down. "serial" is the
prediction for communication that hides behind nothing.
"""

import argparse
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jddp.workbench.links import AMPERE, Fabric, Link

POINTS = Path(__file__).with_name("published_scaling.toml")
BACKWARD = 2 / 3  # of the time of a step; no source measures it
GRADIENT_BYTES = 4
_ROW = "{:<44}{:>5}{:>11}{:>11}{:>8}{:>7}  {}"


@dataclass(frozen=True)
class Layer:
    """A layer: gradients in bytes, and its share of the backward pass."""

    bytes: float
    share: float


@dataclass(frozen=True)
class Point:
    """One published point, and its prediction."""

    name: str
    source: str
    num_gpus: int
    published: float
    predicted: float
    serial: float

    @property
    def error(self) -> float:
        """Predicted minus published, in points."""
        return 100 * (self.predicted - self.published)


def layers_of(model: dict[str, Any]) -> list[Layer]:
    """Layers in the order of the backward pass."""
    repeat = model.get("repeat", [1] * len(model["flops"]))
    flops = sum(model["flops"])
    found = []
    for parameters, part, times in zip(model["parameters"], model["flops"], repeat, strict=True):
        one = Layer(parameters * 1e6 * GRADIENT_BYTES / times, part / flops / times)
        found += [one] * times
    return found[::-1]


def buckets(layers: Sequence[Layer], bucket_bytes: float) -> Iterator[tuple[float, float]]:
    """Share of the backward pass after which a bucket is full, and its bytes."""
    done = held = 0.0
    for layer in layers:
        done += layer.share
        held += layer.bytes
        if held >= bucket_bytes:
            yield done, held
            held = 0.0
    if held:
        yield done, held


def step_seconds(
    ready: Sequence[tuple[float, float]], micro: float, accumulate: int, fabric: Fabric | None
) -> float:
    """Seconds of a step, whose gradients are sent in its last micro-batch.

    Args:
      ready: The buckets: the share of the backward pass after which each is full, and its bytes.
      micro: Seconds of a micro-batch.
      accumulate: Number of micro-batches.
      fabric: The network; None for one GPU.
    """
    computed = micro * accumulate
    sent = 0.0
    for share, num_bytes in ready if fabric else ():
        full = computed - BACKWARD * micro * (1 - share)
        sent = max(sent, full) + fabric.seconds(num_bytes)
    return max(computed, sent)


def fabric_of(network: dict[str, float], num_gpus: int) -> Fabric | None:
    if num_gpus == 1:
        return None
    per_host = min(num_gpus, int(network["devices_per_host"]))
    links = dict(AMPERE)
    for name, key in (("nvlink", "nvlink"), ("nic", "nic")):
        links[name] = Link(network[key] * 1e9, AMPERE[name].hop_seconds, "published_scaling.toml")
        low = AMPERE[f"{name}_ll"]
        rate = min(low.bytes_per_second, links[name].bytes_per_second / 2)
        links[f"{name}_ll"] = Link(rate, low.hop_seconds, low.source)
    return Fabric(num_gpus // per_host, per_host, links)


def predict(file: Path) -> list[Point]:
    """All points of a file with their predictions."""
    read = tomllib.loads(file.read_text())
    models, networks = read["models"], read["networks"]
    return [
        Point(
            point["name"],
            point["source"],
            int(num_gpus),
            published,
            *efficiencies(point, layers_of(models[point["model"]]), networks, int(num_gpus)),
        )
        for point in read["points"]
        for num_gpus, published in point["efficiency"].items()
    ]


def efficiencies(
    point: dict[str, Any], layers: Sequence[Layer], networks: dict[str, Any], num_gpus: int
) -> tuple[float, float]:
    """The predicted efficiency, and that of communication which hides behind nothing."""
    fabrics = [
        fabric_of(networks[point["network"]], n) for n in (point.get("base_gpus", 1), num_gpus)
    ]
    pairs = list(zip(point.get("accumulate", [1, 1]), fabrics, strict=True))
    ready = list(buckets(layers, point["bucket_mb"] * 1e6))
    found = []
    for sent in (ready, [(1.0, num_bytes) for _, num_bytes in ready]):
        base, many = (n / step_seconds(sent, point["step_ms"] / 1e3, n, x) for n, x in pairs)
        found.append(many / base)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=Path, default=POINTS)
    points = predict(parser.parse_args().points)
    print(_ROW.format("point", "GPUs", "published", "predicted", "serial", "error", "source"))
    for x in points:
        shares = (f"{share:.3f}" for share in (x.published, x.predicted, x.serial))
        print(_ROW.format(x.name, x.num_gpus, *shares, f"{x.error:+.1f}", x.source))
    print()
    for name, some in (("all", points), ("text models", [x for x in points if "BERT" in x.name])):
        errors = [x.error for x in some]
        middle, worst = statistics.median(errors), max(errors, key=abs)
        print(f"{name}: {len(some)} points, median error {middle:+.1f}, worst {worst:+.1f}")


if __name__ == "__main__":
    main()
