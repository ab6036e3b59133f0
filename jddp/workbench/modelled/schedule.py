"""Walk a compiled program in its order, and add up what communication cannot hide.

    timeline = walk(read_program(text), gpu, Fabric(1, 8, gpu.links))
    print(timeline.step_seconds, timeline.exposed_share)

The last argument may be any object with `seconds` and `among`, such as measured times.

There is one clock for computing and one queue for communicating. A collective enters the queue
where it starts; where it must be done, computing waits for it. What waits is exposed, the rest is
hidden behind what was computed in between. A loop that communicates is walked as often as it runs;
of branches, the one that sends most.

This is a model, from the order that XLA has chosen and from assumed rates, not a measurement. It
leaves out that kernels slow down during a collective, which shares their cores and memory.
"""

from dataclasses import dataclass

from jddp.ground.errors import UsageError
from jddp.inspection.collectives import Collective, collectives_of
from jddp.inspection.hlo import Computation, HloProgram, Instruction
from jddp.workbench.modelled.cost import Cost, cost, trip_count
from jddp.workbench.modelled.described import Gpu
from jddp.workbench.modelled.links import SHARES, Fabric

LARGE_BYTES = 64 * 1024


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

    @property
    def op(self) -> str:
        """Name of the collective."""
        return self.collectives[0].op


@dataclass(frozen=True)
class Timeline:
    """The times that a walk through the program finds.

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


def walk(program: HloProgram, gpu: Gpu, network: Fabric) -> Timeline:
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
    program: HloProgram, computation: Computation, clock: "_Clock", gpu: Gpu, network: Fabric
) -> None:
    """Runs a computation once."""
    started: dict[str, _Started | None] = {}  # None once it is over.
    for instruction in computation.instructions:
        if instruction.op.endswith("-done") and instruction.operands[0] in started:
            if sent := started.pop(instruction.operands[0]):
                clock.wait_for(sent)
            continue
        found = tuple(collectives_of(program, computation, instruction))
        if found and instruction.runs and instruction.op in _CONTROL:
            for inner in _runs(program, instruction):
                _run(program, inner, clock, gpu, network)
        elif found:
            sent = clock.start(instruction.name, found, network)
            started[instruction.name] = sent if found[0].is_async else None
            if not found[0].is_async:
                clock.wait_for(sent)
        else:
            clock.computed += cost(program, computation, instruction, gpu)


_CONTROL = ("while", "call", "conditional")


def _runs(program: HloProgram, instruction: Instruction) -> list[Computation]:
    """The computations of a loop, a call or a branch; of branches, the one that sends most."""
    inner = [program.computations[name] for name in instruction.runs]
    if instruction.op == "while":
        return inner * trip_count(instruction)

    def sent(branch: Computation) -> int:
        return sum(x.bytes for x in collectives_of(program, branch, *branch.instructions))

    return [max(inner, key=sent)] if instruction.op == "conditional" else inner


@dataclass(frozen=True)
class _Started:
    """A transfer under way: when it will be over, and what had been computed as it started."""

    name: str
    collectives: tuple[Collective, ...]
    bytes: int
    needed: float
    start: float
    end: float
    before: Cost


class _Clock:
    """The time of computing, and the queue of transfers that run meanwhile."""

    def __init__(self) -> None:
        self.computed = Cost()
        self.transfers: list[Transfer] = []
        self._waited = 0.0
        self._queue_end = 0.0

    @property
    def now(self) -> float:
        return self.computed.seconds + self._waited

    def start(self, name: str, found: tuple[Collective, ...], network: Fabric) -> _Started:
        first, size = found[0], sum(x.bytes for x in found)
        for each in found:
            if each.op not in SHARES:
                raise UsageError(
                    f"Instruction {each.name!r}: there is no model of {each.op!r}. What is "
                    f"modelled are {', '.join(SHARES)}."
                )
        needed = network.among(first.devices).seconds(size, first.op)
        self._queue_end = max(self.now, self._queue_end) + needed
        return _Started(name, found, size, needed, self.now, self._queue_end, self.computed)

    def wait_for(self, sent: _Started) -> None:
        wait = max(0.0, sent.end - self.now)
        self._waited += wait
        transfer = Transfer(
            name=sent.name,
            collectives=sent.collectives,
            bytes=sent.bytes,
            is_async=sent.collectives[0].is_async,
            needed_seconds=sent.needed,
            waited_seconds=wait,
            hiding_seconds=self.computed.seconds - sent.before.seconds,
            num_products=self.computed.num_products - sent.before.num_products,
            started_at=sent.start,
        )
        self.transfers.append(transfer)
