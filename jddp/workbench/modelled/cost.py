"""How long one instruction of a compiled program takes on a GPU, by arithmetic or by memory.

A kernel takes as long as its products and convolutions at their rates, or as its bytes at the
memory's rate, whichever is longer, and a fixed time for its launch. Nothing is measured: the rates
come from a `Gpu`, the operations and bytes are counted from shapes.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jddp.ground.errors import UsageError
from jddp.inspection.hlo import Computation, HloProgram, HloShape, Instruction
from jddp.workbench.modelled.described import Gpu

# They name, view or order what is there already.
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
# They wait for something that no schedule shows.
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


def cost(program: HloProgram, computation: Computation, instruction: Instruction, gpu: Gpu) -> Cost:
    """Returns what one instruction of `computation` costs.

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


def _cost_of_control(program: HloProgram, instruction: Instruction, gpu: Gpu) -> Cost:
    parts = []
    for name in instruction.runs:
        inner = program.computations[name]
        costs = (cost(program, inner, each, gpu) for each in inner.instructions)
        parts.append(sum(costs, Cost()))
    if instruction.op != "while":
        return max(parts, key=lambda part: part.seconds)  # of a conditional, the longest branch
    once, times = sum(parts, Cost()), trip_count(instruction)
    return Cost(once.seconds * times, once.num_products * times)


def trip_count(loop: Instruction) -> int:
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
    program: HloProgram, computation: Computation, instruction: Instruction
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


def _dims_in(pattern: re.Pattern[str], instruction: Instruction) -> list[int]:
    found = pattern.search(instruction.attributes)
    if not found:
        raise UsageError(f"Product {instruction.name!r} does not say over which dims it sums.")
    return [int(dim.strip('"')) for dim in found[1].split(",") if dim]


def _count_product(
    computation: Computation, instruction: Instruction, contracted: list[int]
) -> float:
    left = _operand_shapes(computation, instruction)[0]
    summed = math.prod(left.dims[dim] for dim in contracted)
    return 2 * instruction.shapes[0].size * summed * _slowdown(left)


def _count_convolution(computation: Computation, instruction: Instruction, called: str) -> float:
    """Two for each output and each weight that reaches it."""
    labels = _DIM_LABELS.search(instruction.attributes)
    if not labels:
        raise UsageError(f"Convolution {instruction.name!r} does not name its dims.")
    result, (first, second, *_) = instruction.shapes[0], _operand_shapes(computation, instruction)
    # XLA gives all three the labels of the forward convolution, whatever their operands are.
    if "BackwardInput" in called:
        outputs, weights = first, second
    elif "BackwardFilter" in called:
        outputs, weights = second, result
    else:
        outputs, weights = result, second
    features = weights.dims[labels[2].index("o")]
    return 2 * outputs.size * (weights.size // features) * _slowdown(first)


def _operand_shapes(computation: Computation, instruction: Instruction) -> list[HloShape]:
    return [operand.shapes[0] for operand in computation.operands(instruction)]


def _slowdown(operand: HloShape) -> float:
    """How much longer than with 16-bit numbers: 32 bits (as TF32) take twice as long."""
    return max(1.0, operand.bytes / max(1, operand.size) / 2)


def _bytes_moved(program: HloProgram, computation: Computation, instruction: Instruction) -> int:
    """Bytes read and written; if a fusion only slices an operand, the bytes of the slices."""
    read = 0
    inner = program.computations[instruction.runs[0]] if instruction.op == "fusion" else None
    for number, operand in enumerate(computation.operands(instruction)):
        read += operand.bytes if inner is None else _bytes_read(inner, number)
    return read + instruction.bytes


def _bytes_read(fusion: Computation, number: int) -> int:
    parameter = next(x for x in fusion.instructions if x.number == number)
    users = [x for x in fusion.instructions if parameter.name in x.operands]
    if users and all(_reads_partly(user, parameter) for user in users):
        return min(parameter.bytes, sum(user.bytes for user in users if user.op in _PARTIAL_READS))
    return parameter.bytes


def _reads_partly(user: Instruction, operand: Instruction) -> bool:
    # An operand that is updated in place is read and written only where it changes.
    is_read = user.op in (*_PARTIAL_READS, "dynamic-update-slice")
    return is_read and user.operands[0] == operand.name
