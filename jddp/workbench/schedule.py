"""Walks a compiled program in its order, and adds up the communication that nothing hides.

    timeline = walk(read_program(text), gpu, Fabric(1, 8, gpu.links))
    print(timeline.step_seconds, timeline.exposed_share)

The last argument may be any object with `seconds` and `among`, such as measured times.

There is one clock for computing and one queue for communicating. A collective enters the queue
where it starts; where it must be done, computing waits for it. The time of waiting is exposed, and
the rest is hidden behind the computation in between. A loop that communicates is walked as often as
it runs; a conditional is walked along the branch that sends most.

A kernel takes as long as its products and convolutions at their rates, or as its bytes at the
memory's rate, whichever is longer, and a fixed time for its launch.

This is a model, from the order that XLA has chosen and from assumed rates, not a measurement. It
leaves out that kernels slow down during a collective, which shares their cores and memory.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jddp.ground.errors import UsageError
from jddp.inspection import hlo
from jddp.workbench.described import Gpu
from jddp.workbench.links import SHARES, Fabric

# Operations that name, view or order existing arrays.
_FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
# Operations that wait for something that no schedule shows.
_REFUSED = {"infeed", "outfeed", "recv", "recv-done", "send", "send-done"}
_PARTIAL_READS = ("dynamic-slice", "gather", "slice")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CONTRACTED_BY_LIBRARY = re.compile(r'"lhs_contracting_dimensions":\[([\d,"]*)\]')


@dataclass(frozen=True)
class Cost:
    """The time that instructions take, and how many products and convolutions are among them."""

    seconds: float = 0.0
    num_products: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Both, one after the other."""
        return Cost(self.seconds + other.seconds, self.num_products + other.num_products)


def cost(
    program: hlo.HloProgram, computation: hlo.Computation, instruction: hlo.Instruction, gpu: Gpu
) -> Cost:
    """Returns the cost of one instruction of `computation`.

    Raises:
      UsageError: If it cannot be modelled: a loop of unknown length, an asynchronous copy, an
        unknown library call.
    """
    op = instruction.op
    if op in _FREE:
        return Cost()
    if op in _REFUSED or op.endswith(("-start", "-done", "-update")):
        raise UsageError(
            f"Instruction {instruction.name!r}: there is no model of {op!r}, which waits for "
            "something that the program does not show. Model a step without it."
        )
    if op in ("while", "call", "conditional"):
        return _cost_of_control(program, instruction, gpu)
    operations = list(_operations(program, computation, instruction))
    seconds = sum(
        count / (gpu.convolution_flops if kind == "convolution" else gpu.product_flops)
        for kind, count in operations
    )
    by_memory = _bytes_moved(program, computation, instruction) / gpu.bytes_per_second
    return Cost(max(seconds, by_memory) + gpu.kernel_seconds, bool(operations))


def _cost_of_control(program: hlo.HloProgram, instruction: hlo.Instruction, gpu: Gpu) -> Cost:
    parts = []
    for name in instruction.runs:
        inner = program.computations[name]
        costs = (cost(program, inner, each, gpu) for each in inner.instructions)
        parts.append(sum(costs, Cost()))
    if instruction.op != "while":
        return max(parts, key=lambda part: part.seconds)  # the longest branch of a conditional
    once, times = sum(parts, Cost()), trip_count(instruction)
    return Cost(once.seconds * times, once.num_products * times)


def trip_count(loop: hlo.Instruction) -> int:
    """Returns how often a loop runs.

    Raises:
      UsageError: If the compiler does not know it.
    """
    if loop.trip_count is None:
        raise UsageError(
            f"Loop {loop.name!r} runs an unknown number of times, so its time is unknown. "
            "Model a step whose loops have fixed lengths (lax.scan, fori_loop with constants)."
        )
    return loop.trip_count


def _operations(
    program: hlo.HloProgram, computation: hlo.Computation, instruction: hlo.Instruction
) -> Iterator[tuple[str, float]]:
    """Yields the kind and the operations of each product and convolution, at 16-bit speed."""
    op = instruction.op
    if op == "fusion":
        for name in instruction.runs:
            inner = program.computations[name]
            for each in inner.instructions:
                yield from _operations(program, inner, each)
    elif op == "dot":
        contracted = _dims_in(_CONTRACTED, instruction)
        yield "product", _count_product(computation, instruction, contracted)
    elif op == "convolution":
        yield "convolution", _count_convolution(computation, instruction, "")
    elif op == "custom-call":
        target = _TARGET.search(instruction.attributes)
        called = target[1] if target else ""
        if called.startswith("__cudnn$conv"):
            yield "convolution", _count_convolution(computation, instruction, called)
        elif called.startswith("__cublas"):
            contracted = _dims_in(_CONTRACTED_BY_LIBRARY, instruction)
            yield "product", _count_product(computation, instruction, contracted)
        else:
            raise UsageError(
                f"Instruction {instruction.name!r}: there is no model of the library call "
                f"{called!r}. Model a step without it."
            )


def _dims_in(pattern: re.Pattern[str], instruction: hlo.Instruction) -> list[int]:
    found = pattern.search(instruction.attributes)
    if not found:
        raise UsageError(f"Product {instruction.name!r} does not say over which dims it sums.")
    return [int(dim.strip('"')) for dim in found[1].split(",") if dim]


def _count_product(
    computation: hlo.Computation, instruction: hlo.Instruction, contracted: list[int]
) -> float:
    left = _operand_shapes(computation, instruction)[0]
    summed = math.prod(left.dims[dim] for dim in contracted)
    return 2 * instruction.shapes[0].size * summed * _slowdown(left)


def _count_convolution(
    computation: hlo.Computation, instruction: hlo.Instruction, called: str
) -> float:
    """Counts two operations for each output and each weight that reaches it."""
    labels = _DIM_LABELS.search(instruction.attributes)
    if not labels:
        raise UsageError(f"Convolution {instruction.name!r} does not name its dims.")
    result, (first, second, *_) = instruction.shapes[0], _operand_shapes(computation, instruction)
    # XLA labels all three convolutions as the forward one, whatever their operands are.
    if "BackwardInput" in called:
        outputs, weights = first, second
    elif "BackwardFilter" in called:
        outputs, weights = second, result
    else:
        outputs, weights = result, second
    features = weights.dims[labels[2].index("o")]
    return 2 * outputs.size * (weights.size // features) * _slowdown(first)


def _operand_shapes(
    computation: hlo.Computation, instruction: hlo.Instruction
) -> list[hlo.HloShape]:
    return [operand.shapes[0] for operand in computation.operands(instruction)]


def _slowdown(operand: hlo.HloShape) -> float:
    """How much longer than with 16-bit numbers: 32 bits (as TF32) take twice as long."""
    return max(1.0, operand.bytes / max(1, operand.size) / 2)


def _bytes_moved(
    program: hlo.HloProgram, computation: hlo.Computation, instruction: hlo.Instruction
) -> int:
    """Bytes read and written; if a fusion only slices an operand, the bytes of the slices."""
    read = 0
    inner = program.computations[instruction.runs[0]] if instruction.op == "fusion" else None
    for number, operand in enumerate(computation.operands(instruction)):
        read += operand.bytes if inner is None else _bytes_read(inner, number)
    return read + instruction.bytes


def _bytes_read(fusion: hlo.Computation, number: int) -> int:
    parameter = next(x for x in fusion.instructions if x.number == number)
    users = [x for x in fusion.instructions if parameter.name in x.operands]
    if users and all(_reads_partly(user, parameter) for user in users):
        return min(parameter.bytes, sum(user.bytes for user in users if user.op in _PARTIAL_READS))
    return parameter.bytes


def _reads_partly(user: hlo.Instruction, operand: hlo.Instruction) -> bool:
    # An operand that is updated in place is read and written only where it changes.
    is_read = user.op in (*_PARTIAL_READS, "dynamic-update-slice")
    return is_read and user.operands[0] == operand.name


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
      hiding_seconds: Time of computing between its start and the place where it must be done.
      num_products: Products and convolutions in that computation.
      started_at: Seconds of the step at which it enters the queue.
    """

    name: str
    collectives: tuple[hlo.Collective, ...]
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
        """Transfers of at most 64 KiB: loss and metrics, and statistics of batch norm."""
        return tuple(x for x in self.transfers if x.bytes <= LARGE_BYTES)

    @property
    def exposed_share(self) -> float:
        """The share of the step that waits for large transfers."""
        return sum(x.waited_seconds for x in self.large) / self.step_seconds

    @property
    def small_exposed_share(self) -> float:
        """The share of the step that waits for small transfers."""
        return sum(x.waited_seconds for x in self.small) / self.step_seconds


def walk(program: hlo.HloProgram, gpu: Gpu, network: Fabric) -> Timeline:
    """Models one run of a scheduled program.

    Args:
      program: Result of `read_program` for a program compiled for GPUs.
      gpu: GPU whose rates the computation has.
      network: Links whose times the transfers have.

    Raises:
      UsageError: If the program holds an instruction that cannot be modelled, or is not scheduled.
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
    program: hlo.HloProgram,
    computation: hlo.Computation,
    clock: "_Clock",
    gpu: Gpu,
    network: Fabric,
) -> None:
    """Runs a computation once."""
    started: dict[str, _Started | None] = {}  # None once it is over.
    for instruction in computation.instructions:
        if instruction.op.endswith("-done") and instruction.operands[0] in started:
            if sent := started.pop(instruction.operands[0]):
                clock.wait_for(sent)
            continue
        found = tuple(hlo.collectives_of(program, computation, instruction))
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


def _runs(program: hlo.HloProgram, instruction: hlo.Instruction) -> list[hlo.Computation]:
    """The computations of a loop or a call, or the branch of a conditional that sends most."""
    inner = [program.computations[name] for name in instruction.runs]
    if instruction.op == "while":
        return inner * trip_count(instruction)

    def sent(branch: hlo.Computation) -> int:
        return sum(x.bytes for x in hlo.collectives_of(program, branch, *branch.instructions))

    return [max(inner, key=sent)] if instruction.op == "conditional" else inner


@dataclass(frozen=True)
class _Started:
    """A transfer under way: when it will be over, and the time computed before it started."""

    name: str
    collectives: tuple[hlo.Collective, ...]
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

    def start(self, name: str, found: tuple[hlo.Collective, ...], network: Fabric) -> _Started:
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
