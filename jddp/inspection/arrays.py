"""The largest arrays that a compiled program makes, and what of the traced step they come from."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jddp.inspection.hlo import Computation, Program, Shape

_OP_NAME = re.compile(r'op_name="(?:jit\([^)]*\)/)?(?:shard_map/)?([^"]*)"')
_MAKE_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}


@dataclass(frozen=True)
class Array:
    """An array that has a place in memory of its own.

    Attributes:
      shape: Its dtype and dims.
      origin: The layer and operation that it was made for, as JAX names them.
    """

    shape: Shape
    origin: str

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.bytes

    def __str__(self) -> str:
        """Shape and origin."""
        dims = ",".join(map(str, self.shape.dims))
        return f"{self.shape.dtype}[{dims}]" + (f" of {self.origin}" if self.origin else "")


def largest_arrays(program: Program, most: int = 3) -> tuple[Array, ...]:
    """The largest arrays, larger ones first; those of one origin and size count once."""
    made = dict.fromkeys(_made_in(program, program.entry))
    return tuple(sorted(made, key=lambda array: -array.bytes)[:most])


def _made_in(program: Program, computation: Computation) -> Iterator[Array]:
    for instruction in computation.instructions:
        if instruction.op not in _MAKE_NOTHING:
            found = _OP_NAME.search(instruction.attributes)
            for shape in instruction.shapes:
                yield Array(shape, found[1] if found else "")
        if instruction.op in ("while", "call", "conditional"):  # a fusion makes its results alone
            for name in instruction.runs:
                yield from _made_in(program, program.computations[name])
