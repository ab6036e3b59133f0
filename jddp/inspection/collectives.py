"""Finds the collectives of a compiled program, and the purpose of each.

    for collective in collectives(read_program(text)):
        print(collective.op, collective.bytes, collective.is_async)
        print(purpose_of(collective))     # "gradients", "parameters, updated", ...

A collective has several forms in a program, and all are found: a plain instruction; a pair `-start`
and `-done`, which may still be marked to run in one piece; such a pair around a fusion that
contains the collective; a part of an ordinary fusion; on TPUs a chain of fusions, each of which
computes while the same exchange continues; any of these in a loop or a branch. Its purpose follows
from the name scopes of the traced step.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jddp.engine.optimizer import GATHERED
from jddp.inspection.hlo import Computation, HloProgram, HloShape, Instruction
from jddp.modules.base import LOSS
from jddp.reduce.units import BETWEEN, UNIT

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
