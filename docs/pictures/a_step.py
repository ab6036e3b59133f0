"""Pictures of one step: replicas, buckets, overlap, batch norm.

The docstring of a function is the title of its picture, and what a screen reader reads.
"""

from statistics import fmean, pvariance
from typing import NamedTuple

from canvas import EDGE, INNER, MIDDLE, WIDTH, Picture

# Dense layers on 784 inputs: gradients in the order in which the backward pass finishes them.
LAYERS = {"Dense_3": (512, 10), "Dense_2": (512, 512), "Dense_1": (512, 512), "Dense_0": (784, 512)}
LEAVES = {
    f"{layer}/{leaf}": 4 * size  # bytes of float32
    for layer, (rows, columns) in LAYERS.items()
    for leaf, size in (("bias", columns), ("kernel", rows * columns))
}
LIMITS = (2**20, 5 * 2**19)  # bytes of the first bucket, and of the others


def replica() -> str:
    """What a replica is.

    A global batch of eight rows is split over four devices, two rows each. Each device holds the
    same parameters, and runs the forward and the backward pass on its own rows, which gives its own
    gradients. An all-reduce gives every device their mean over all rows. Each makes the same
    update, and ends with the same parameters.
    """
    picture = Picture(replica.__doc__)
    picture.text(MIDDLE, 28, "global batch: 8 rows", "strong", anchor="middle")
    for device in range(4):
        x = EDGE + 104 * device
        for row in (0, 1):
            picture.box(x + 50 * row, 38, 46, 26, str(2 * device + row), "rows")
        picture.arrow(x + 48, 66, x + 48, 84)
        picture.rect(x, 86, 96, 408, "plain")
        picture.text(x + 48, 105, f"device {device}", "strong", anchor="middle")
        picture.text(x + 48, 124, f"replica {device}", anchor="middle")
        _column(picture, x + 2, 134, ["parameters", "forward", "backward", "gradients"])
        _column(picture, x + 2, 372, ["mean", "update", "parameters"])
        for top in (288, 358):
            picture.arrow(x + 48, top, x + 48, top + 13)
    picture.rect(8, 302, WIDTH - 16, 56, "sent")
    picture.text(MIDDLE, 325, "all-reduce", "strong", anchor="middle")
    picture.text(MIDDLE, 346, "gradients become their mean over all rows", anchor="middle")
    y = picture.legend(508, {"own": "of this device alone", "same": "the same on every device"})
    return picture.svg(y + 4)


def _column(picture: Picture, x: float, y: float, names: list[str]) -> None:
    for i, name in enumerate(names):
        kind = "own" if name in ("forward", "backward", "gradients") else "same"
        picture.box(x, y + 42 * i, 92, 28, name, kind)
        if i:
            picture.arrow(x + 46, y + 42 * i - 14, x + 46, y + 42 * i - 1)


def fill() -> list[list[str]]:
    """The leaves in buckets; one is closed where the next leaf would take it over its limit."""
    filled: list[list[str]] = [[]]
    for name, size in LEAVES.items():
        if bytes_of(filled[-1]) + size > _limit(len(filled) - 1):
            filled.append([])
        filled[-1].append(name)
    return filled


def bytes_of(names: list[str]) -> int:
    """Bytes of some leaves."""
    return sum(LEAVES[name] for name in names)


def _limit(bucket: int) -> int:
    return LIMITS[min(bucket, len(LIMITS) - 1)]


def _in_words(num_bytes: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"


def buckets() -> str:
    """What a bucket is.

    The backward pass finishes the gradients of the last layer first. In that order they fill
    buckets: one is closed where the next gradient would take it over its limit, and is sent in one
    all-reduce.
    """
    found = fill()
    facts = (f"Bucket {i} holds {', '.join(names)}." for i, names in enumerate(found))
    picture = Picture(buckets.__doc__, *facts)
    picture.text(EDGE, 26, "forward pass", "quiet")
    for i, layer in enumerate(reversed(LAYERS)):
        picture.box(EDGE + 108 * i, 36, 84, 28, layer, "plain", style="code")
        if i:
            picture.arrow(EDGE + 108 * i - 23, 50, EDGE + 108 * i - 1, 50)
    picture.arrow(WIDTH - EDGE, 80, EDGE, 80)
    words = "backward pass: gradients of the last layer first"
    picture.text(WIDTH - EDGE, 100, words, "quiet", anchor="end")
    y = 116.0
    for i, names in enumerate(found):
        height = max(30.0 * len(names) + 8, 84)
        picture.rect(EDGE, y, 232, height, "plain")
        for j, name in enumerate(names):
            top = y + height / 2 - 15 * len(names) + 30 * j + 1
            picture.box(EDGE + 5, top, 134, 28, name, "own", style="code")
            picture.text(EDGE + 224, top + 19, _in_words(LEAVES[name]), "quiet", anchor="end")
        picture.arrow(EDGE + 236, y + height / 2, EDGE + 260, y + height / 2)
        _gauge(picture, i, bytes_of(names), y + height / 2)
        y += height + 12
    y = picture.notes(y, "bucket_mb=(1, 2.5); by default (1, 25)")
    return picture.svg(y + 8)


def _gauge(picture: Picture, bucket: int, num_bytes: int, middle: float) -> None:
    x, width, limit = EDGE + 268, INNER - 268, _limit(bucket)
    picture.text(x, middle - 24, f"bucket {bucket}", "strong")
    picture.rect(x, middle - 16, width, 10, "plain")
    picture.rect(x, middle - 16, max(2.0, width * num_bytes / limit), 10, "own")
    words = f"{num_bytes / 2**20:.2f} of {limit / 2**20:g} MiB"
    picture.text(x, middle + 10, words, "quiet", room=width + EDGE)
    picture.box(x, middle + 17, width, 24, "one all-reduce", "sent")


class Span(NamedTuple):
    """Work from one time to another."""

    kind: str
    text: str
    start: float
    end: float


def schedule(*, overlap: bool) -> list[Span]:
    """When the parts of a step run, and the all-reduces of the buckets that they complete.

    With overlap the pass continues once a bucket is packed and the one before it has arrived:
    `jddp/reduce/backward.py:Pass.hold`. Else buckets follow each other after the pass.
    """
    spans, now, arrived = [Span("plain", "forward", 0, 60)], 60.0, 0.0
    parts, sends = (34, 64, 64), (20, 55, 55)
    for i, (part, send) in enumerate(zip(parts, sends, strict=True)):
        spans.append(Span("own", str(i), now, now + part))
        now += part
        if overlap:
            now = max(now, arrived)
            arrived = now + send
            spans.append(Span("sent", str(i), now, arrived))
    for i, send in enumerate(() if overlap else sends):
        begin = max(now, arrived)
        arrived = begin + send
        spans.append(Span("sent", str(i), begin, arrived))
    return [*spans, Span("same", "update", arrived, arrived + 56)]


def overlap() -> str:
    """A step without overlap and with it.

    Two timelines of a step with three buckets, on one scale. Without overlap the device runs the
    forward pass and the whole backward pass, waits for the all-reduces of buckets 0, 1 and 2, and
    updates. With overlap the all-reduce of a bucket runs during the next part of the backward pass:
    the device waits for the last bucket alone, and the step is shorter.
    """
    picture = Picture(overlap.__doc__)
    end = EDGE + _timeline(picture, 28, "overlap=False", schedule(overlap=False))
    start = EDGE + _timeline(picture, 172, "overlap=True", schedule(overlap=True))
    picture.line(end, 202, end, 228)
    picture.arrow(end, 224, start + 2, 224)
    picture.text((start + end) / 2, 216, "shorter", "quiet", anchor="middle")
    meanings = {
        "own": "part of the backward pass that fills bucket 0, 1, 2",
        "sent": "all-reduce of bucket 0, 1, 2",
    }
    y = picture.notes(
        picture.legend(304, meanings),
        "Part 2 begins once bucket 1 is packed and bucket 0 has",
        "arrived, so at most one bucket is under way.",
        "Lengths show the order; they are not measured.",
    )
    return picture.svg(y + 8)


def _timeline(picture: Picture, y: float, title: str, spans: list[Span]) -> float:
    picture.text(EDGE, y, title, "code strong")
    picture.text(EDGE, y + 24, "device", "quiet")
    picture.text(EDGE, y + 80, "network", "quiet")
    for span in spans:
        top = y + 30 + 56 * (span.kind == "sent")
        picture.box(EDGE + span.start, top, span.end - span.start, 26, span.text, span.kind)
    last, end = max(span.end for span in spans if span.kind == "own"), spans[-1].start
    picture.rect(EDGE + last, y + 30, end - last, 26, "plain", dashed=True)
    picture.text(EDGE + (last + end) / 2, y + 48, "waits", "quiet", anchor="middle")
    return spans[-1].end


def batch_norm() -> str:
    """Batch norm: statistics of each replica, and of all rows.

    Two replicas hold the values 1 and 3, and 5 and 11, of one feature. With batch_norm="local" each
    has the statistics of its own rows. With batch_norm="sync", the default, one all-reduce adds up
    sums, sums of squares and counts, and both have the statistics of all rows, like one device.
    """
    rows = [[1, 3], [5, 11]]
    joined = [x for own in rows for x in own]
    facts = (f"Replica {i} alone: {_moments(own)}." for i, own in enumerate(rows))
    picture = Picture(batch_norm.__doc__, *facts, f"All rows: {_moments(joined)}.")
    picture.text(EDGE, 28, 'batch_norm="local"', "code strong")
    picture.text(EDGE, 222, 'batch_norm="sync"', "code strong")
    picture.text(WIDTH - EDGE, 222, "the default", "quiet", anchor="end")
    for i, own in enumerate(rows):
        x, middle = EDGE + 212 * i, EDGE + 212 * i + 98
        _replica_rows(picture, i, own, 42, 144)
        _normalizes(picture, middle, 118, _moments(own), "own")
        _replica_rows(picture, i, own, 236, 262)
        picture.arrow(middle, 298, middle, 313)
        for j, (name, value) in enumerate(sums(own)):
            picture.text(x + 16, 329 + 20 * j, name, "quiet")
            picture.text(x + 180, 329 + 20 * j, str(value), anchor="end")
        picture.arrow(middle, 376, middle, 391)
        _normalizes(picture, middle, 430, _moments(joined), "same")
    added = ", ".join(str(value) for _, value in sums(joined))
    picture.box(8, 392, WIDTH - 16, 30, f"one all-reduce adds them up: {added}", "sent")
    return picture.svg(514)


def sums(rows: list[int]) -> list[tuple[str, int]]:
    """What a replica sends of its rows: `jddp/modules/batch_norm.py:moments`."""
    return [("sum", sum(rows)), ("sum of squares", sum(x * x for x in rows)), ("count", len(rows))]


def _moments(rows: list[int]) -> str:
    return f"mean {fmean(rows):g}, variance {pvariance(rows):g}"


def _replica_rows(picture: Picture, i: int, rows: list[int], y: float, height: float) -> None:
    x = EDGE + 212 * i
    picture.rect(x, y, 196, height, "plain")
    picture.text(x + 98, y + 22, f"replica {i}", "strong", anchor="middle")
    for j, value in enumerate(rows):
        picture.box(x + 16 + 84 * j, y + 32, 80, 28, str(value), "rows")


def _normalizes(picture: Picture, middle: float, y: float, words: str, kind: str) -> None:
    picture.arrow(middle, y - 8, middle, y + 7)
    picture.box(middle - 92, y + 8, 184, 28, words, kind)
    picture.text(middle, y + 56, "normalizes with these", "quiet", anchor="middle")
