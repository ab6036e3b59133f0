"""What a picture of a step shows: lanes of time for a device, and figures and tables beside them.

A modelled step and a measured one are both given as a `Pictured`, and drawn by the same code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jddp.workbench.pictures.times import StepTimes

COMPUTING, EXPOSED = "computing", "exposed"
Stretches = Sequence[tuple[float, float]]  # seconds from the beginning


class Band(NamedTuple):
    """Stretches of the computing lane that are drawn alike.

    Attributes:
      style: A phase, "forward", "backward" or "update"; `COMPUTING` of an unknown phase; or
        `EXPOSED`, where it waits for communication.
      title: Words for them.
      times: When they begin and end, in order.
    """

    style: str
    title: str
    times: Stretches


class SentBand(NamedTuple):
    """A collective of the communication lane, with all its runs.

    Attributes:
      title: Words for it.
      times: When it is under way.
      number: Number by which it has its color; None for gray.
      label: Words beside its windows.
      windows: Time from the start of each run until it is needed; empty if not known.
    """

    title: str
    times: Stretches
    number: int | None = None
    label: str = ""
    windows: Stretches = ()


@dataclass(frozen=True)
class Lanes:
    """What one device computes and sends, over time.

    Attributes:
      kind: "modelled" or "measured".
      name: The device, or what stands for all.
      seconds: Length of the lanes.
      waited_seconds: Time in which it waits for communication.
      computing: The computing lane.
      sent: The communication lane.
    """

    kind: str
    name: str
    seconds: float
    waited_seconds: float
    computing: Sequence[Band]
    sent: Sequence[SentBand]


class Table(NamedTuple):
    """A table of words and numbers.

    Attributes:
      heading: Heading above it.
      head: Names of its columns.
      rows: Cells, row by row.
      numbers: Columns of numbers, which are aligned.
      note: A sentence about it.
      colors: Numbers by which rows have their colors; None for gray, () for no colors.
    """

    heading: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int]
    note: str = ""
    colors: Sequence[int | None] = ()


@dataclass(frozen=True)
class Pictured:
    """A step as it is shown on a page.

    Attributes:
      verdict: The result, in a sentence that begins with its kind.
      note: Origin of the figures.
      times: Where its time goes.
      lanes: Devices that are drawn.
      tables: Tables below.
    """

    verdict: str
    note: str
    times: StepTimes
    lanes: Sequence[Lanes]
    tables: Sequence[Table]
