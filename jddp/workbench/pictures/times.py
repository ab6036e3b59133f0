"""Where the time of a step goes, modelled or measured, and several of these side by side.

The definitions are those of Holistic Trace Analysis, for both: a step computes, or communicates and
does not compute, which is exposed, or does neither, which is idle.
https://hta.readthedocs.io/en/latest/source/features/temporal_breakdown.html
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jddp.workbench.pictures.figures import in_ms

MODELLED, MEASURED = "modelled", "measured"
_COLUMN = 21
_UNKNOWN = "not known"


class StepTimes(NamedTuple):
    """Where the time of a step goes, in seconds, on average over devices.

    Attributes:
      kind: `MODELLED` or `MEASURED`.
      step: Time of the step.
      compute: Part in which a device computes.
      exposed: Part in which it communicates and does not compute.
      idle: Part in which it does neither; None if that is not known.
      data_wait: Time in which the host waits for a batch; None if that is not known.
    """

    kind: str
    step: float
    compute: float
    exposed: float
    idle: float | None = None
    data_wait: float | None = None

    def cells(self) -> Iterator[str]:
        """A cell for each row of `ROWS`."""
        yield in_ms(self.step)
        for part in (self.compute, self.exposed, self.idle, self.data_wait):
            if part is None:
                yield _UNKNOWN
            else:
                yield f"{in_ms(part)} {part / self.step:7.2%}"


ROWS = (
    "time",
    "computing",
    "waiting for communication",
    "idle",
    "host waiting for its batch",
)


def compare_times(times: Sequence[StepTimes]) -> list[list[str]]:
    """Rows of a table with one column for each, of those rows that one of them knows."""
    columns = [[*x.cells()] for x in times]
    rows = [[*row] for row in zip(ROWS, *columns, strict=True)]
    return [row for row in rows if {*row[1:]} != {_UNKNOWN}]


def times_as_text(times: Sequence[StepTimes]) -> str:
    """The same table as text."""
    head = ["", *(x.kind for x in times)]
    return "\n".join(
        f"{name:<27}" + "".join(f"{x:>{_COLUMN}}" for x in cells)
        for name, *cells in (head, *compare_times(times))
    )
