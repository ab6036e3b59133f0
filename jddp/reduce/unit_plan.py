"""Plans the units in which a program gathers its divided parameters, from its equations.

    for unit in plan_units(jaxpr, [Part(...), ..., rows], unit_bytes):
        print(unit.paths, unit.wire_dtype)

Parameters are gathered in the order of their first use. One that the program only casts to a
narrower float, as mixed precision does, is cast first and gathered in that dtype: half the bytes.

A region that is recomputed, and the body of a scan over a parameter, are programs of their own.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jddp.jaxprs import carried
from jddp.reduce.plan import Bucket, GatheredUnit, plan_buckets
from jddp.reduce.shards import Shape
from jddp.typing import Leaf, PyTree

CALLS = {"jit", "pjit", "closed_call", "core_call"}
REMAT = {"checkpoint", "remat2", "remat"}


@dataclasses.dataclass(frozen=True)
class Part:
    """A replica's part of a parameter.

    Attributes:
      value: The part, in the parameter's dtype.
      dim: Dim along which the parameter is divided.
      shape: Shape of the whole parameter.
      cast: Narrower dtype to which the program has cast the parameter; None for its own.
      whole: Function that returns the whole parameter; None outside of a program.
      name: Path of the parameter, for plans.
    """

    value: Leaf
    dim: int
    shape: Shape
    cast: np.dtype | None = None
    whole: Callable[[], jax.Array] | None = None
    name: str = ""

    @property
    def dtype(self) -> np.dtype:
        """Dtype in which the program sees the parameter."""
        return self.cast or np.dtype(self.value.dtype)

    def sliced(self, value: Leaf) -> "Part":
        """A slice along the first dim, which is not the divided one."""
        return Part(value, self.dim - 1, self.shape[1:], self.cast, name=self.name)


class Input(NamedTuple):
    """A parameter that an equation takes.

    Attributes:
      place: Place of the parameter among the inputs of the program.
      part: The part, in the dtype that the equation sees.
    """

    place: int
    part: Part


def plan_units(jaxpr: Jaxpr, given: Sequence[PyTree], unit_bytes: tuple[int, ...]) -> list[Bucket]:
    """Returns the units of a program, whose `leaves` are places among its inputs.

    Each parameter that the program needs whole stands in exactly one.

    Args:
      jaxpr: The program.
      given: Inputs of the program; a `Part` in the place of a whole parameter.
      unit_bytes: Largest sizes of units, as those of buckets.
    """
    parts = {i: x for i, x in enumerate(given) if isinstance(x, Part)}
    first: dict[int, int] = {}
    seen: dict[int, set[np.dtype]] = {i: set() for i in parts}
    for num, (eqn, used) in enumerate(takers(jaxpr, given)):
        for i, x in used.items():
            if needs_whole(eqn, i, x.part):
                first.setdefault(x.place, num)
                seen[x.place].add(x.part.dtype)
    # Seen in several dtypes, a parameter is gathered once, in its own.
    sent = {i: min(seen[i]) if len(seen[i]) == 1 else np.dtype(parts[i].value.dtype) for i in parts}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.value.dtype) for x in parts.values()]
    places, units = [*parts], []
    for dtype in dict.fromkeys(sent.values()):
        ready = [first.get(i) if sent[i] == dtype else None for i in places]
        plan = plan_buckets(shapes, bucket_bytes=unit_bytes, ready=ready, wire_dtype=dtype)
        for bucket in plan.buckets:
            own = tuple(places[i] for i in bucket.leaves)
            paths = tuple(parts[i].name for i in own)
            units.append(dataclasses.replace(bucket, leaves=own, paths=paths))
    return units


def list_units(
    jaxpr: Jaxpr,
    given: Sequence[PyTree],
    unit_bytes: tuple[int, ...],
    num_slices: int = 1,
    num_passes: int = 1,
) -> Iterator[GatheredUnit]:
    """Yields the units of a program, and of its loops over layers and regions that are recomputed.

    Args:
      jaxpr: The program.
      given: Inputs of the program, as of `plan_units`; parts may be shapes.
      unit_bytes: Largest sizes of units.
      num_slices: Number of times that a pass runs the program.
      num_passes: Number of passes that gather: 2 if the backward pass does.
    """
    for bucket in plan_units(jaxpr, given, unit_bytes):
        yield GatheredUnit(bucket, num_slices, num_passes)
    for eqn, used in takers(jaxpr, given):
        own = [
            used[i].part if i in used and not needs_whole(eqn, i, used[i].part) else None
            for i in range(len(eqn.invars))
        ]
        if eqn.primitive.name in REMAT:
            yield from list_units(eqn.params["jaxpr"], own, unit_bytes, num_slices, 2)
        elif eqn.primitive.name == "scan":
            slices = [x and x.sliced(jax.eval_shape(lambda v: v[0], x.value)) for x in own]
            num = num_slices * eqn.params["length"]
            yield from list_units(eqn.params["jaxpr"].jaxpr, slices, unit_bytes, num, num_passes)


def takers(jaxpr: Jaxpr, given: Sequence[PyTree]) -> Iterator[tuple[JaxprEqn, dict[int, Input]]]:
    """Yields the equations that take parameters, inside of calls too, and which: by operand."""
    names = {
        v: Input(i, x)
        for i, (v, x) in enumerate(zip(jaxpr.invars, given, strict=True))
        if isinstance(x, Part)
    }
    yield from _takers(jaxpr, names)


def _takers(jaxpr: Jaxpr, names: dict[Var, Input]) -> Iterator[tuple[JaxprEqn, dict[int, Input]]]:
    for eqn in jaxpr.eqns:
        used = {i: names[v] for i, v in enumerate(eqn.invars) if _is_among(v, names)}
        if eqn.primitive.name in CALLS:
            inner = eqn.params["jaxpr"].jaxpr
            own = {inner.invars[i]: x for i, x in used.items()}
            yield from _takers(inner, own)
            both = zip(eqn.outvars, inner.outvars, strict=True)
            names |= {v: own[result] for v, result in both if _is_among(result, own)}
        elif 0 in used and is_narrowing(eqn, used[0].part):
            cast = dataclasses.replace(used[0].part, cast=np.dtype(eqn.params["new_dtype"]))
            names[eqn.outvars[0]] = used[0]._replace(part=cast)
        elif used:
            yield eqn, used


def _is_among(v: Var | Literal, names: dict[Var, Input]) -> TypeGuard[Var]:
    return not isinstance(v, Literal) and v in names


def is_narrowing(eqn: JaxprEqn, x: PyTree) -> bool:
    """Whether an equation whose first operand is `x` casts a parameter to a narrower float."""
    is_cast = eqn.primitive.name == "convert_element_type" and isinstance(x, Part)
    if not is_cast or x.cast is not None:  # a second cast would round in another way than both
        return False
    old, new = np.dtype(x.value.dtype), np.dtype(eqn.params["new_dtype"])
    are_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return are_floats and new.itemsize < old.itemsize


def needs_whole(eqn: JaxprEqn, operand: int, x: Part) -> bool:
    """Whether an equation needs a parameter whole, and does not gather it itself."""
    if eqn.primitive.name in REMAT:
        return False
    return eqn.primitive.name != "scan" or operand < carried(eqn)[1] or x.dim == 0
