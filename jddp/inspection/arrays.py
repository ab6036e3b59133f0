"""The largest arrays that a compiled program makes, and the operations that they come from."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jddp.inspection.hlo import Computation, Program, Shape

_PREFIX = re.compile(r"(?:jit\([^)]*\)/)?(?:shard_map/)?")
_MAKE_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}


@dataclass(frozen=True)
class Array:
    """An array with its own memory.

    Attributes:
      shape: Dtype and dims.
      origin: Layer and operation that made it, by JAX's names.
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
            origin = _PREFIX.sub("", instruction.op_name, count=1)
            yield from (Array(shape, origin) for shape in instruction.shapes)
        if instruction.op in ("while", "call", "conditional"):  # a fusion makes only its results
            for name in instruction.runs:
                yield from _made_in(program, program.computations[name])
