"""Walk a compiled program in its order, and add up what communication cannot hide.

    timeline = walk(read_program(text), GPUS["h100_sxm"], make_network())
    print(timeline.step_seconds, timeline.exposed_share)

There is one clock for computing and one queue for communicating. A collective enters the queue
where it starts; where it must be done, computing waits for it. What waits is exposed, the rest is
hidden behind what was computed in between. A loop that communicates is walked as often as it runs.

This is a model, from the order that XLA has chosen and from assumed rates, not a measurement. It
leaves out that kernels slow down beside a collective, which shares their cores and memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jddp.errors import UsageError
from jddp.inspection.collectives import Collective, collectives_of
from jddp.inspection.hlo import Computation, HloProgram, Instruction
from jddp.inspection.modelled.cost import Cost, cost, trip_count
from jddp.inspection.modelled.gpus import Gpu, Network

LARGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Transfer:
    """One run of a collective of the schedule.

    Attributes:
      name: Name of the instruction that starts it.
      bytes: Bytes of its payload.
      is_async: Whether anything can be computed while it runs.
      needed_seconds: How long it takes.
      waited_seconds: How long computing stands still for it.
      hiding_seconds: What is computed between its start and where it must be done.
      num_products: Products and convolutions among that.
    """

    name: str
    bytes: int
    is_async: bool
    needed_seconds: float
    waited_seconds: float
    hiding_seconds: float
    num_products: int


@dataclass(frozen=True)
class Timeline:
    """What a walk finds.

    Attributes:
      step_seconds: Time from the first instruction to the last.
      compute_seconds: Time of computation in that.
      transfers: Every run of a collective, in the order in which they must be done.
    """

    step_seconds: float
    compute_seconds: float
    transfers: tuple[Transfer, ...]

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


def walk(program: HloProgram, gpu: Gpu, network: Network) -> Timeline:
    """Models one run of a scheduled program.

    Args:
      program: Result of `read_program` for a program compiled for GPUs.
      gpu: Whose rates the computing has.
      network: Whose times the transfers have.

    Raises:
      UsageError: If the program holds what cannot be modelled, or is not scheduled.
    """
    if not program.is_scheduled:
        raise UsageError(
            "This program is not scheduled: its order means nothing. Give the text of a compiled "
            "program, not of a lowered one."
        )
    clock = _Clock()
    _run(program, program.entry, clock, gpu, network)
    return Timeline(clock.now, clock.computed.seconds, tuple(clock.transfers))


def _run(
    program: HloProgram, computation: Computation, clock: "_Clock", gpu: Gpu, network: Network
) -> None:
    """Runs a computation once."""
    flights: dict[str, _Flight | None] = {}  # None once it has landed.
    for instruction in computation.instructions:
        if instruction.op.endswith("-done") and instruction.operands[0] in flights:
            if flight := flights.pop(instruction.operands[0]):
                clock.wait_for(flight)
            continue
        found = tuple(collectives_of(program, computation, instruction))
        if found and instruction.op == "while":
            for _ in range(trip_count(instruction)):
                for name in instruction.runs:
                    _run(program, program.computations[name], clock, gpu, network)
        elif found:
            payload = _payload(instruction, found)
            flight = clock.start(payload, network)
            flights[instruction.name] = flight if payload.is_async else None
            if not payload.is_async:
                clock.wait_for(flight)
        else:
            clock.computed += cost(program, computation, instruction, gpu)


# Of an all-reduce's time: in a ring it is a reduce-scatter and then an all-gather.
_SHARES = {"all-reduce": 1.0, "reduce-scatter": 0.5, "all-gather": 0.5}


@dataclass(frozen=True)
class _Payload:
    """All that one instruction sends."""

    name: str
    bytes: int
    is_async: bool
    share: float
    devices: tuple[int, ...]


def _payload(instruction: Instruction, found: Sequence[Collective]) -> _Payload:
    for each in found:
        if each.op not in _SHARES or instruction.op in ("conditional", "call"):
            where = "" if each.name == instruction.name else f" inside {instruction.op!r}"
            raise UsageError(
                f"Instruction {each.name!r}: there is no model of {each.op!r}{where}. What is "
                f"modelled are {', '.join(_SHARES)} outside branches and calls."
            )
    share = _SHARES[found[0].op]
    first = found[0]
    num_bytes = sum(x.bytes for x in found)
    return _Payload(instruction.name, num_bytes, first.is_async, share, first.devices)


@dataclass(frozen=True)
class _Flight:
    """A transfer under way: when it will be over, and what had been computed as it started."""

    payload: _Payload
    needed: float
    end: float
    before: Cost


class _Clock:
    """Computing, and the queue of transfers beside it."""

    def __init__(self) -> None:
        self.computed = Cost()
        self.transfers: list[Transfer] = []
        self._waited = 0.0
        self._queue_end = 0.0

    @property
    def now(self) -> float:
        return self.computed.seconds + self._waited

    def start(self, payload: _Payload, network: Network) -> _Flight:
        needed = payload.share * network.among(payload.devices).seconds(payload.bytes)
        self._queue_end = max(self.now, self._queue_end) + needed
        return _Flight(payload, needed, self._queue_end, self.computed)

    def wait_for(self, flight: _Flight) -> None:
        wait = max(0.0, flight.end - self.now)
        self._waited += wait
        transfer = Transfer(
            name=flight.payload.name,
            bytes=flight.payload.bytes,
            is_async=flight.payload.is_async,
            needed_seconds=flight.needed,
            waited_seconds=wait,
            hiding_seconds=self.computed.seconds - flight.before.seconds,
            num_products=self.computed.num_products - flight.before.num_products,
        )
        self.transfers.append(transfer)
