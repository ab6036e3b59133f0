"""The result of a walk through a schedule: what was computed and sent, when, and what waited."""

from dataclasses import dataclass

from jddp.inspection.collectives import Collective

LARGE_BYTES = 64 * 1024
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True)
class Stretch:
    """Computing of one kind without a pause.

    Attributes:
      phase: "forward", "backward", or "update" for all that follows.
      start: Seconds from the beginning of the step to its own.
      end: Seconds to its end.
    """

    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """One run of a collective of the schedule.

    Attributes:
      name: Name of the instruction that starts it.
      collectives: The collectives in it, which are of one kind.
      bytes: Bytes of its payload.
      is_async: Whether anything can be computed while it runs.
      needed_seconds: How long it takes.
      waited_seconds: How long computing stands still for it.
      hiding_seconds: What is computed between its start and where it must be done.
      num_products: Products and convolutions among that.
      started_at: Seconds of the step at which it enters the queue.
      ended_at: Seconds of the step at which it is over.
      done_at: Seconds of the step at which computing continues after it.
    """

    name: str
    collectives: tuple[Collective, ...]
    bytes: int
    is_async: bool
    needed_seconds: float
    waited_seconds: float
    hiding_seconds: float
    num_products: int
    started_at: float
    ended_at: float
    done_at: float

    @property
    def op(self) -> str:
        """Name of the collective."""
        return self.collectives[0].op


@dataclass(frozen=True)
class Timeline:
    """What a walk finds.

    Attributes:
      step_seconds: Time from the first instruction to the last.
      compute_seconds: Time of computation in that.
      transfers: Every run of a collective, in the order in which they must be done.
      spans: All computing, in order; between them it waits.
    """

    step_seconds: float
    compute_seconds: float
    transfers: tuple[Transfer, ...]
    spans: tuple[Stretch, ...] = ()

    @property
    def large(self) -> tuple[Transfer, ...]:
        """Transfers above 64 KiB: gradients and parameters."""
        return tuple(x for x in self.transfers if x.bytes > LARGE_BYTES)

    @property
    def small(self) -> tuple[Transfer, ...]:
        """The others: loss and metrics, and statistics of batch norm."""
        return tuple(x for x in self.transfers if x.bytes <= LARGE_BYTES)

    @property
    def exposed_share(self) -> float:
        """The share of the step that waits for large transfers."""
        return sum(x.waited_seconds for x in self.large) / self.step_seconds

    @property
    def small_exposed_share(self) -> float:
        """The share of the step that waits for small transfers."""
        return sum(x.waited_seconds for x in self.small) / self.step_seconds
