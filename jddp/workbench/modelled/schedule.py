"""Walk a compiled program in its order, and add up what communication cannot hide.

    timeline = walk(read_program(text), gpu, Fabric(1, 8, gpu.links))
    print(timeline.step_seconds, timeline.exposed_share)

The last argument may be any object with times of collectives, such as measured ones.

There is one clock for computing and one queue for communicating. A collective enters the queue
where it starts; where it must be done, computing waits for it. What waits is exposed, the rest is
hidden behind what was computed in between. A loop that communicates is walked as often as it runs;
of branches, the one that sends most.

This is a model, from the order that XLA has chosen and from assumed rates, not a measurement. It
leaves out that kernels slow down during a collective, which shares their cores and memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jddp.engine.optimizer import OPTIMIZER
from jddp.ground.errors import UsageError
from jddp.inspection.collectives import Collective, collectives_of, is_backward
from jddp.inspection.hlo import Computation, HloProgram, Instruction
from jddp.workbench.modelled.cost import Cost, cost, trip_count
from jddp.workbench.modelled.described import Gpu
from jddp.workbench.modelled.links import SHARES

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
    """The times that a walk through the program finds.

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


@runtime_checkable
class Times(Protocol):
    """Times of collectives that have a network to themselves."""

    def seconds(self, num_bytes: float, op: str = "all-reduce") -> float:
        """The time of one collective of `num_bytes` on each device."""

    def among(self, devices: Sequence[int]) -> "Times":
        """The times among some of the devices, or among all for ()."""


def walk(program: HloProgram, gpu: Gpu, network: Times) -> Timeline:
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
    return Timeline(clock.now, clock.computed.seconds, tuple(clock.transfers), tuple(clock.spans))


def _run(
    program: HloProgram, computation: Computation, clock: "_Clock", gpu: Gpu, network: Times
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
            payload = _payload(instruction, found)
            sent = clock.start(payload, network)
            started[instruction.name] = sent if payload.is_async else None
            if not payload.is_async:
                clock.wait_for(sent)
        else:
            for part, op_name in _computed(program, computation, instruction, gpu):
                clock.compute(part, op_name)


_CONTROL = ("while", "call", "conditional")


def _computed(
    program: HloProgram, computation: Computation, instruction: Instruction, gpu: Gpu
) -> list[tuple[Cost, str]]:
    """Costs and names of an instruction; of a loop over micro-batches, pass by pass."""
    if not {FORWARD, BACKWARD} <= _phases_in(program, instruction):
        return [(cost(program, computation, instruction, gpu), instruction.op_name)]
    inner = [program.computations[name] for name in instruction.runs]
    once = [part for x in inner for y in x.instructions for part in _computed(program, x, y, gpu)]
    return once * (trip_count(instruction) if instruction.op == "while" else 1)


def _phases_in(program: HloProgram, instruction: Instruction) -> set[str]:
    """The phases of the operations in a loop or a call."""
    runs = instruction.runs if instruction.op in ("while", "call") else ()
    inner = [x for name in runs for x in program.computations[name].instructions]
    return {_phase(x.op_name) for x in inner}.union(*(_phases_in(program, x) for x in inner))


def _runs(program: HloProgram, instruction: Instruction) -> list[Computation]:
    """The computations of a loop, a call or a branch; of branches, the one that sends most."""
    inner = [program.computations[name] for name in instruction.runs]
    if instruction.op == "while":
        return inner * trip_count(instruction)

    def sent(branch: Computation) -> int:
        return sum(x.bytes for x in collectives_of(program, branch, *branch.instructions))

    return [max(inner, key=sent)] if instruction.op == "conditional" else inner


@dataclass(frozen=True)
class _Payload:
    """All that one instruction sends."""

    name: str
    collectives: tuple[Collective, ...]

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.collectives)

    @property
    def is_async(self) -> bool:
        return self.collectives[0].is_async


def _payload(instruction: Instruction, found: Sequence[Collective]) -> _Payload:
    for each in found:
        if each.op not in SHARES:
            raise UsageError(
                f"Instruction {each.name!r}: there is no model of {each.op!r}. What is modelled "
                f"are {', '.join(SHARES)}."
            )
    return _Payload(instruction.name, tuple(found))


@dataclass(frozen=True)
class _Started:
    """A transfer under way: when it will be over, and what had been computed as it started."""

    payload: _Payload
    needed: float
    start: float
    end: float
    before: Cost


class _Clock:
    """The time of computing, and the queue of transfers that run meanwhile."""

    def __init__(self) -> None:
        self.computed = Cost()
        self.transfers: list[Transfer] = []
        self.spans: list[Stretch] = []
        self._waited = 0.0
        self._queue_end = 0.0

    @property
    def now(self) -> float:
        return self.computed.seconds + self._waited

    def compute(self, part: Cost, op_name: str) -> None:
        before = self.now
        self.computed += part
        last = self.spans[-1] if self.spans else Stretch(FORWARD, before, before)
        phase = _phase(op_name) or last.phase
        if self.spans and phase == last.phase and before == last.end:
            self.spans[-1] = Stretch(phase, last.start, self.now)
        elif part.seconds:
            self.spans.append(Stretch(phase, before, self.now))

    def start(self, payload: _Payload, network: Times) -> _Started:
        first = payload.collectives[0]
        needed = network.among(first.devices).seconds(payload.bytes, first.op)
        self._queue_end = max(self.now, self._queue_end) + needed
        return _Started(payload, needed, self.now, self._queue_end, self.computed)

    def wait_for(self, sent: _Started) -> None:
        wait = max(0.0, sent.end - self.now)
        self._waited += wait
        transfer = Transfer(
            name=sent.payload.name,
            collectives=sent.payload.collectives,
            bytes=sent.payload.bytes,
            is_async=sent.payload.is_async,
            needed_seconds=sent.needed,
            waited_seconds=wait,
            hiding_seconds=self.computed.seconds - sent.before.seconds,
            num_products=self.computed.num_products - sent.before.num_products,
            started_at=sent.start,
            ended_at=sent.end,
            done_at=self.now,
        )
        self.transfers.append(transfer)


def _phase(op_name: str) -> str:
    """The phase of a traced operation, from its name; or nothing."""
    if is_backward(op_name):
        return BACKWARD
    if OPTIMIZER in op_name:
        return UPDATE
    return FORWARD if "jvp(" in op_name else ""
