"""Digests of the equations of a traced program, part by part, that every process computes alike.

Equal programs have equal digests: in another process, after a restart, with other hash seeds and
memory addresses. Variables are numbered within a part in the order of their use, constants count
by their values, functions by their names, and neither lines of source nor shardings count. A part
is the equations inside a `jax.named_scope` of its name.

    reader = Reader(["model", "loss"], axis="data")
    reader.read(jaxpr, labels={variable: "params/kernel"})
    reader.digests()                                    # {"model": "1f0c...", "loss": "9a31..."}

This module knows equations, and nothing of models, losses or optimizers.
"""

import copy
import dataclasses
import enum
import functools
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from jddp.typing import PyTree

ByPart = dict[str, list[str]]  # digests of programs inside an equation, by part
Operand = Var | Literal

# Parameters of equations that say where something lies, or how it is called; no numbers follow.
_UNREAD = ("mesh", "sharding", "src_info", "debug_info")
_SHAPES = ("shape", "shapes", "sizes", "dimensions")
_CALLS = {"jit", "shard_map"}  # all but their programs is about compilation and placement


class Reader:
    """Reads equations into the digests of parts.

    Args:
      parts: Names of the scopes. Of nested ones the last name in this order counts.
      axis: Name of the axis of the replicas, which may be another in an equal program.
      with_shapes: Whether shapes count.
      follows: Whether an equation outside of every scope, such as one of a custom derivative,
        belongs to the part of the equation before it; else to none.
    """

    def __init__(
        self, parts: Sequence[str], *, axis: str, with_shapes: bool = True, follows: bool = True
    ) -> None:
        self._parts, self._axis, self._with_shapes = parts, axis, with_shapes
        self._follows = follows
        self._inner: dict[tuple[int, str | None], Mapping[str, str]] = {}
        self._kept: list[Jaxpr] = []  # An address is that of one program as long as it lives.
        self._text: dict[str, list[str]] = defaultdict(list)
        self._numbers: dict[str, dict[Var, str]] = defaultdict(dict)

    def digests(self) -> dict[str, str]:
        """Digests of all that was read, by part; none of a part without equations."""
        return {
            part: hashlib.sha256("\n".join(lines).encode()).hexdigest()
            for part, lines in self._text.items()
        }

    def add(self, part: str, x: PyTree) -> None:
        """Adds a nest of values to a part."""
        self._text[part].append(self._text_of(x, part, defaultdict(list)))

    def read(
        self,
        jaxpr: Jaxpr,
        labels: Mapping[Var, str],
        part: str | None = None,
        same: Mapping[Var, Operand] | None = None,
        *,
        with_results: bool = True,
    ) -> None:
        """Reads a program.

        Args:
          jaxpr: The program.
          labels: Names of variables, such as inputs, in place of numbers.
          part: Part of the first equations, until a scope is found.
          same: Operands of a program before to which variables of this one are equal.
          with_results: Whether it counts which variables are its results.
        """
        same = same or {}

        def name(v: Operand, part: str) -> str:
            v = same.get(v, v) if isinstance(v, Var) else v
            if isinstance(v, Literal):
                return self.value(v.val)
            if v in labels:
                return labels[v]
            numbers = self._numbers[part]
            return numbers.setdefault(v, f"{len(numbers)}:{self._form(v.aval)}")

        for eqn in jaxpr.eqns:
            part = self._part_of(eqn, part)
            found: ByPart = defaultdict(list)
            params = self._params(eqn, part, found)
            if part is not None:
                given = [name(v, part) for v in eqn.invars]
                made = [name(v, part) for v in eqn.outvars]
                words = [eqn.primitive.name, *params, *found.pop(part, []), *given, "->", *made]
                self._text[part].append(" ".join(words))
            for other, digests in found.items():
                self._text[other] += digests
        results = [same.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
        for of, numbers in self._numbers.items() if with_results else ():
            own = [name(v, of) for v in results if isinstance(v, Literal) or v in numbers]
            self._text[of].append(f"return {own}")

    def _part_of(self, eqn: JaxprEqn, before: str | None) -> str | None:
        stack = eqn.source_info.name_stack.stack
        scopes = {x.name for x in stack if type(x).__name__ != "Transform"}
        found = next((part for part in reversed(self._parts) if part in scopes), None)
        return before if found is None and self._follows and not scopes else found

    def _params(self, eqn: JaxprEqn, part: str | None, found: ByPart) -> list[str]:
        """Texts of an equation's parameters; adds to `found` the digests of programs in them."""
        if part is None:  # Nothing of it counts but what has a scope inside.
            for inner in jaxprs_in_params(eqn.params):
                self._program(inner, (), part, found)
            return []
        is_call = eqn.primitive.name in _CALLS
        texts = []
        for name, x in sorted(eqn.params.items()):
            is_read = name == "jaxpr" if is_call else self._is_read(name)
            if is_read:
                texts.append(f"{name}={self._text_of(x, part, found)}")
        return texts

    def _is_read(self, name: str) -> bool:
        is_shape = name.endswith(_SHAPES) and not self._with_shapes
        return not is_shape and name != "name" and not any(word in name for word in _UNREAD)

    def _text_of(self, x: PyTree, part: str | None, found: ByPart) -> str:
        """Text of a parameter: a value, a program, or a nest of them."""
        if isinstance(x, ClosedJaxpr):
            return self._program(x.jaxpr, x.consts, part, found)
        if isinstance(x, Jaxpr):
            return self._program(x, (), part, found)
        if isinstance(x, functools.partial):
            x = (x.func, x.args, x.keywords)
        is_record = dataclasses.is_dataclass(x) and not isinstance(x, type)
        kind = type(x).__qualname__ if is_record else ""
        if is_record:
            x = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if self._is_read(f.name)}
        if isinstance(x, Mapping):
            items = sorted((str(key), self._text_of(y, part, found)) for key, y in x.items())
            return f"{kind}{items}"
        if isinstance(x, tuple | list | set | frozenset):
            texts = [self._text_of(y, part, found) for y in x]
            return str(sorted(texts) if isinstance(x, set | frozenset) else texts)
        return self.value(x)

    def value(self, x: PyTree) -> str:
        """Text of a value that holds no program: the same for equal values in every process."""
        if isinstance(x, str):
            return "the axis" if x == self._axis else repr(x)
        if x is None or isinstance(x, bool | int | float | complex | bytes | np.dtype | enum.Enum):
            return f"{type(x).__name__} {x!r}"
        if hasattr(x, "__array__"):
            return self._array(x)
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            return self._form(x)
        if callable(x):
            return f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', type(x).__name__)}"
        text = repr(x)
        # The form of an object without a text of its own: its address, and nothing else.
        return type(x).__qualname__ if "0x" in text or text.startswith("<") else text

    def _array(self, x: PyTree) -> str:
        if isinstance(x, jax.core.Tracer):
            return self._form(x.aval)
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            if not x.is_fully_replicated:
                return self._form(x)
            x = x.addressable_data(0)
        content = np.asarray(x).tobytes()
        is_small = len(content) <= hashlib.sha256().digest_size
        text = content.hex() if is_small else hashlib.sha256(content).hexdigest()
        return f"{self._form(x)} {text}"

    def _form(self, x: PyTree) -> str:
        if not hasattr(x, "dtype"):
            return type(x).__name__
        return f"{_name(x.dtype)}{x.shape}" if self._with_shapes else _name(x.dtype)

    def _program(
        self, jaxpr: Jaxpr, consts: Sequence[PyTree], part: str | None, found: ByPart
    ) -> str:
        """Adds the digests of a program inside another one to those of their parts."""
        key = id(jaxpr), part
        if key not in self._inner:
            self._kept.append(jaxpr)
            inner = copy.copy(self)
            inner._text, inner._numbers = defaultdict(list), defaultdict(dict)
            # By position: numbers would be those of the first use, whichever input it is.
            labels = {v: f"in {i} {self._form(v.aval)}" for i, v in enumerate(jaxpr.invars)}
            labels |= dict(zip(jaxpr.constvars, map(self.value, consts), strict=False))
            if part is not None:
                inner._numbers[part] = {}
            inner.read(jaxpr, labels, part)
            self._inner[key] = inner.digests()
        for of, digest in self._inner[key].items():
            found[of].append(digest)
        return "program"


_name = functools.cache(str)  # of a dtype, for which numpy takes its time
