"""Reads the text of a compiled program: its instructions in order, and its collectives.

    program = read_program(jitted.lower(*arguments).compile().as_text())
    for instruction in program.entry.instructions:
        print(instruction.op, instruction.bytes)

This module reads text: it takes no model, no step and no devices.

    for collective in collectives(read_program(text)):
        print(collective.op, collective.bytes, collective.is_async)
        print(purpose_of(collective))     # "gradients", "parameters, updated", ...

A collective has several forms in a program, and all are found: a plain instruction; a pair `-start`
and `-done`, which may still be marked to run in one piece; such a pair around a fusion that
contains the collective; a part of an ordinary fusion; on TPUs a chain of fusions, each of which
computes while the same exchange continues; any of these in a loop or a branch. Its purpose follows
from the name scopes of the traced step.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jddp.engine.optimizer import GATHERED
from jddp.ground.errors import UsageError
from jddp.modules.base import LOSS
from jddp.reduce.units import BETWEEN, UNIT

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
# A shape has brackets of its own, "f32[2,3]{1,0:T(8,128)}", but no word before one.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_RUNS = re.compile(
    r", (?:calls|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TO_APPLY = re.compile(r", to_apply=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# Groups as lists, {{0,1},{2,3}}; or as the rows of a transposed range, [2,4]<=[4,2]T(1,0).
_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_RANGE = re.compile(r"replica_groups=\[(\d+),\d+\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]+)\}")


class HloShape(NamedTuple):
    """The dtype and dims of one array, as XLA names them: "bf16", (256, 1000)."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.ceil(self.size * _bits(self.dtype) / 8)


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: Name, which other instructions use.
      op: Name of the operation: "fusion", "all-reduce-start", ...
      shapes: Results: one array, or all arrays of a tuple, however nested.
      operands: Names of the instructions that it reads.
      number: Position of a parameter; None for other instructions.
      runs: Names of the computations that it runs unchanged: of a fusion, a call, a loop or a
        branch, but not the sum that a reduction applies.
      attributes: The text behind the operands.
    """

    name: str
    op: str
    shapes: tuple[HloShape, ...]
    operands: tuple[str, ...]
    number: int | None
    runs: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """Operation of the traced program that it came from, such as "jit(step)/add"; or empty."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def devices(self) -> tuple[int, ...]:
        """The first group of devices among which a collective sends; () where all are one group."""
        if pairs := self.pairs:
            return tuple(sorted(set(itertools.chain(*pairs))))
        if found := _GROUP.search(self.attributes):
            return _integers(found[1])
        if not (found := _RANGE.search(self.attributes)):
            return ()
        dims, order = _integers(found[2]), _integers(found[3] or "")
        devices = np.arange(math.prod(dims)).reshape(dims).transpose(order or None)
        return tuple(devices.reshape(int(found[1]), -1)[0].tolist())

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The source and target of each send of a collective-permute; () for other collectives."""
        found = _PAIRS.search(self.attributes)
        numbers = re.findall(r"(\d+),(\d+)", found[1]) if found else []
        return tuple((int(source), int(target)) for source, target in numbers)

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of a loop; None if the compiler does not know it."""
        found = _TRIP_COUNT.search(self.attributes)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions, in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions, by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that `instruction` reads."""
        return [self.by_name[name] for name in instruction.operands]


class HloProgram(NamedTuple):
    """A compiled program.

    Attributes:
      entry: The computation with which it begins.
      computations: All of them, by name.
      is_scheduled: Whether instructions stand in the order in which they will run.
    """

    entry: Computation
    computations: dict[str, Computation]
    is_scheduled: bool


def read_program(text: str) -> HloProgram:
    """Parses the text of a compiled program, such as `jax.stages.Compiled.as_text()`.

    Raises:
      UsageError: If the text is not such a program.
    """
    computations = {}
    entry = None
    for mark, name, body in _COMPUTATION.findall(text):
        lines = filter(str.strip, body.splitlines())
        computations[name] = Computation(name, tuple(map(_read_instruction, lines)))
        entry = computations[name] if mark else entry
    if entry is None:
        raise UsageError(
            f"This text of {len(text)} characters is no compiled program: no computation is marked "
            "ENTRY. Give jitted.lower(...).compile().as_text()."
        )
    return HloProgram(entry, computations, "is_scheduled=true" in text[:10_000])


def _read_instruction(line: str) -> Instruction:
    line = _COMMENT.sub("", line)
    if not (head := _INSTRUCTION.match(line)):
        text = line.strip()[:120]
        raise UsageError(f"{text!r} is no instruction: it has no operation with a name and shape.")
    name, shapes, op = head.groups()
    end = _closing(line, head.end() - 1)
    operands, attributes = line[head.end() : end], line[end + 1 :]
    return Instruction(
        name=name,
        op=op,
        shapes=_read_shapes(shapes),
        operands=() if op in ("parameter", "constant") else _read_operands(operands),
        number=int(operands) if op == "parameter" else None,
        runs=_read_runs(op, attributes),
        attributes=attributes,
    )


def _closing(line: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(line)):
        depth += (line[position] == "(") - (line[position] == ")")
        if depth == 0:
            return position
    raise UsageError(f"A bracket is not closed in {line.strip()[:120]!r}.")


def _read_shapes(text: str) -> tuple[HloShape, ...]:
    # A dynamic dim, "<=8", counts with its bound.
    return tuple(
        HloShape(dtype, tuple(int(dim.strip("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(text)
        if dtype not in ("token", "opaque")
    )


def _read_operands(text: str) -> tuple[str, ...]:
    # Older texts give each operand its shape: "f32[2,2]{1,0} %x".
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    return tuple(operand.split()[-1] for operand in text.split(",") if operand.strip())


def _read_runs(op: str, attributes: str) -> tuple[str, ...]:
    found = _TO_APPLY.findall(attributes) if op in ("call", "call-start") else []
    for names in _RUNS.findall(attributes):
        found += [name.strip().lstrip("%") for name in names.strip("{}").split(",")]
    return tuple(found)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _bits(dtype: str) -> int:
    """The width of an element in bits, which is the first number in the name of its dtype."""
    if dtype == "pred":
        return 8
    if not (width := re.match(r"[a-z]+(\d+)", dtype)):
        raise UsageError(f"{dtype!r} is no dtype of XLA that jddp knows the width of.")
    return int(width[1])


_COLLECTIVE = re.compile(r"all-(gather|reduce)|(\w+-)?all-to-all|reduce-scatter|collective-\w+")
_CHAIN = re.compile(r'chain_id="\w+"')


class Collective(NamedTuple):
    """One exchange between devices.

    Attributes:
      name: Name of the instruction, or of the chain of instructions.
      op_name: Operation of the traced step from which it comes, such as
        "jit(step)/shard_map/bucket_0/psum"; if the compiler has merged several, one of them.
      op: Name of the collective: "all-reduce", "all-gather", "reduce-scatter", ...
      dtypes: Dtypes of the arrays that are sent, each once, in order.
      num_elements: Elements of all these arrays, as they are before a scatter or after a gather.
      bytes: Bytes of all these arrays.
      is_async: Whether other instructions can run while it does.
      is_in_loop: Whether it is in the body of a loop.
      num_runs: Total number of runs; None if the compiler does not know it, as in a branch.
      devices: The first group of devices that send to each other; () where all are one group.
      pairs: Source and target of each send of a collective-permute; () for other collectives.
    """

    name: str
    op_name: str
    op: str
    dtypes: tuple[str, ...]
    num_elements: int
    bytes: int
    is_async: bool
    is_in_loop: bool = False
    num_runs: int | None = 1
    devices: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


def collectives(program: HloProgram) -> tuple[Collective, ...]:
    """Returns every exchange between devices, in the order of the program."""
    found: dict[str | int, Collective] = {}
    for x in collectives_of(program, program.entry, *program.entry.instructions):
        found.setdefault(x.name if _CHAIN.match(x.name) else len(found), x)
    return tuple(found.values())


def collectives_of(
    program: HloProgram, computation: Computation, *instructions: Instruction
) -> Iterator[Collective]:
    """Yields the collectives of some instructions, and of the computations that they run."""
    for instruction in instructions:
        kind = instruction.op.removesuffix("-start")
        if _COLLECTIVE.fullmatch(kind):
            payload = _payload(computation, instruction)
            chain = _CHAIN.search(instruction.attributes)
            yield Collective(
                name=chain[0] if chain else instruction.name,
                op_name=instruction.op_name,
                op=kind,
                dtypes=tuple(dict.fromkeys(shape.dtype for shape in payload)),
                num_elements=sum(shape.size for shape in payload),
                bytes=sum(shape.bytes for shape in payload),
                is_async=_is_async(instruction) or chain is not None,
                devices=instruction.devices,
                pairs=instruction.pairs,
            )
        elif not instruction.op.endswith(("-done", "-update")):
            for name in instruction.runs:
                inner = program.computations[name]
                # A reduce-scatter of a TPU is an all-reduce of which each device keeps its part.
                is_scatter = name.startswith("all-reduce-scatter")
                for found in collectives_of(program, inner, *inner.instructions):
                    yield found._replace(  # Inherits from the instruction that runs it.
                        op="reduce-scatter" if is_scatter else found.op,
                        is_async=found.is_async or _is_async(instruction),
                        is_in_loop=found.is_in_loop or instruction.op == "while",
                        num_runs=_times(instruction, found.num_runs),
                    )


def _payload(computation: Computation, instruction: Instruction) -> tuple[HloShape, ...]:
    """The operands, or the results if they are larger: the whole arrays that are sent."""
    given = tuple(shape for x in computation.operands(instruction) for shape in x.shapes)
    results = instruction.shapes
    if len(results) > len(given):  # The start of a pair holds its operands, results and more.
        results = results[len(given) : 2 * len(given)]
    return max(given, results, key=lambda shapes: sum(shape.bytes for shape in shapes))


def _times(instruction: Instruction, num_runs: int | None) -> int | None:
    """Total number of runs of a collective that runs `num_runs` times per instruction."""
    times = {"conditional": None, "while": instruction.trip_count}.get(instruction.op, 1)
    return None if times is None or num_runs is None else times * num_runs


def _is_async(instruction: Instruction) -> bool:
    # A pair with nothing in between is marked to run in one piece, on the compute stream.
    return instruction.op.endswith("-start") and '"is_sync":true' not in instruction.attributes


GRADIENTS, PARAMETERS = "gradients", "parameters, in outer steps"
_OF_OPTIMIZER = {GATHERED: "optimizer, whole arrays", "parameters": "parameters, updated"}
_BUCKET = re.compile(r"\bbucket_(\d+)/")


def bucket_of(collective: Collective) -> int | None:
    """The position of the bucket in the plan, if it sends one."""
    found = _BUCKET.search(collective.op_name)
    return int(found[1]) if found else None


def is_backward(op_name: str) -> bool:
    """Whether an operation of the traced step is one of the backward pass."""
    # In newer JAX, a backward pass in which buckets leave has lost the name of its call.
    is_opened = f"/{LOSS}/" in op_name and "jvp(" not in op_name
    return is_opened or "transpose(" in op_name


def purpose_of(collective: Collective) -> str:
    """The purpose of a collective, from the name scopes of the step."""
    if "outer_step/" in collective.op_name:
        return PARAMETERS
    if bucket_of(collective) is not None:
        return GRADIENTS
    if UNIT in collective.op_name:
        is_gathered = f"{UNIT}parameters" in collective.op_name
        where = ", between groups" if BETWEEN in collective.op_name else ""
        where += ", in loops" if collective.is_in_loop else ""
        return (f"parameters, {_direction(collective)}" if is_gathered else GRADIENTS) + where
    for scope, purpose in _OF_OPTIMIZER.items():
        if f"{scope}/" in collective.op_name:
            return purpose
    if "metrics/" in collective.op_name:
        # XLA merges collectives of one kind: here a layer's sums with the loss's sums.
        is_joined = is_backward(collective.op_name) or "BatchNorm" in collective.op_name
        return f"metrics; the model, {_direction(collective)}" if is_joined else "loss and metrics"
    return f"the model, {_direction(collective)}"


def _direction(collective: Collective) -> str:
    return "backward" if is_backward(collective.op_name) else "forward"
