"""Pictures of a whole run: batches on another number of devices, the life of a checkpoint.

The docstring of a function is the title of its picture, and what a screen reader reads.
"""

from canvas import EDGE, INNER, MIDDLE, WIDTH, Picture

CELL = 44.0  # width of an example
ROWS_AT = EDGE + 56
GLOBAL_BATCH_SIZE = 8


def elastic() -> str:
    """Elastic resume: the same batches in the same order.

    A run with a global batch of eight examples takes steps 0 and 1 on four devices, two examples
    each, and saves a checkpoint: 2 steps are finished, 16 examples are delivered. It resumes on two
    devices with steps 2 and 3, four examples each. Positions 0 to 31 follow each other, whatever
    the number of devices is.
    """
    picture = Picture(elastic.__doc__)
    y = _batches(picture, 18, num_devices=4, steps=[0, 1])
    picture.arrow(MIDDLE, y, MIDDLE, y + 19)
    picture.rect(80, y + 20, WIDTH - 160, 50, "same")
    picture.text(MIDDLE, y + 40, "checkpoint", "strong", anchor="middle")
    picture.text(MIDDLE, y + 60, "2 finished steps, position 16", anchor="middle")
    picture.arrow(MIDDLE, y + 70, MIDDLE, y + 89)
    y = _batches(picture, y + 90, num_devices=2, steps=[2, 3])
    y = picture.notes(
        y + 12,
        "Numbers are positions in the order of examples. Which",
        "example is at a position depends on data and seed, not",
        "on the number of devices or processes.",
    )
    return picture.svg(y + 8)


def _batches(picture: Picture, y: float, *, num_devices: int, steps: list[int]) -> float:
    """Global batches, split over devices; returns where they end."""
    width, height = GLOBAL_BATCH_SIZE * CELL / num_devices, 30.0 + 36 * len(steps)
    for device in range(num_devices):
        x = ROWS_AT + device * width
        picture.rect(x + 2, y, width - 4, height, "plain")
        words = f"device {device}"
        picture.text(x + width / 2, y + 18, words, "quiet", anchor="middle", room=width)
    for i, step in enumerate(steps):
        picture.text(EDGE, y + 46 + 36 * i, f"step {step}", room=ROWS_AT - EDGE)
        for row in range(GLOBAL_BATCH_SIZE):
            position = GLOBAL_BATCH_SIZE * step + row
            x = ROWS_AT + row * CELL + 5
            picture.box(x, y + 27 + 36 * i, CELL - 10, 28, str(position), "rows")
    return y + height


def checkpoint() -> str:
    """The life of a checkpoint.

    The loop waits while arrays are copied off the devices, with their digests. In the background
    every process writes its part into 1200.new; replicas are compared, and all processes report.
    Process 0 adds arrays.json and run.json, reads every file back for its SHA-256 and syncs it,
    writes SHA256SUMS last, and renames 1200.new to 1200. After a failure or a kill before that,
    1200.new is removed. A run that resumes verifies the newest checkpoint, here 1300: a file is
    damaged, so it is renamed 1300.damaged, and 1200 is verified and used.
    """
    picture = Picture(checkpoint.__doc__)
    copied = "arrays are copied off the devices, with digests"
    y = _stage(picture, 28, "The loop waits", "plain", copied)
    y = _stage(
        picture,
        y,
        "In the background, in 1200.new/",
        "rows",
        "every process writes its part of state/",
        "are replicas equal? have all written?",
        "process 0 writes arrays.json and run.json",
        "it reads every file back: SHA-256, fsync",
        "it writes SHA256SUMS last: fsync, of folders too",
    )
    y = picture.notes(
        y - 22,
        "After a failure or kill up to here 1200.new is removed,",
        "at once or by the next run; earlier checkpoints stay.",
    )
    y = _stage(
        picture,
        y + 28,
        "The checkpoint appears, whole",
        "same",
        "1200.new is renamed 1200; fsync of the folder",
        "checkpoints that are not to be kept are removed",
    )
    picture.line(EDGE, y - 14, WIDTH - EDGE, y - 14)
    y = _stage(
        picture,
        y + 14,
        "A run resumes: first the newest, 1300",
        "bad",
        "a file is not as in SHA256SUMS",
        "renamed 1300.damaged, never removed",
    )
    y = _stage(
        picture,
        y,
        "Then the one before it, 1200",
        "same",
        "every file is as in SHA256SUMS",
        "arrays are read, and have their digests",
        "training resumes after step 1200",
    )
    return picture.svg(y - 18)


def _stage(picture: Picture, y: float, title: str, kind: str, *steps: str) -> float:
    """Steps below a title; returns the base line of the next title."""
    picture.text(EDGE, y, title, "strong")
    for i, step in enumerate(steps):
        top = y + 10 + 42 * i
        if i:
            picture.arrow(MIDDLE, top - 14, MIDDLE, top - 1)
        picture.box(EDGE, top, INNER, 28, step, kind)
    return y + 42 * len(steps) + 28
