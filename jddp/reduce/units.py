"""Parameters divided over the replicas, and gathered unit by unit.

A parameter is not flattened, but divided along one of its dims: the largest that the number of
replicas divides, or none. A unit is several parameters of one dtype that are gathered by one
all-gather. Its transpose, in the backward pass, is one reduce-scatter: each replica gets its part
of the mean of the gradients.

    kernel (768, 3072) on 8 replicas  ─►  (768, 384) on each        dim 1
    bias (10,) on 8 replicas          ─►  whole on each             None

If groups of replicas divide parameters, each by itself, replicas get their parts of their group's
mean. These parts are averaged between groups once for a step, in buckets.

Units are planned from the equations of a program. Parameters are gathered in the order of their
first use. A parameter that the program only casts to a narrower float, as in mixed precision, is
cast first and gathered in that dtype: half the bytes. A region that is recomputed, and the body of
a scan over a parameter, are programs of their own.

    for unit in plan_units(jaxpr, [Part(...), ..., rows], unit_bytes):
        print(unit.paths, unit.wire_dtype)
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jddp.ground.jaxprs import carried
from jddp.ground.typing import PyTree, Shaped, Tree
from jddp.reduce.hooks import mean_over
from jddp.reduce.plan import Bucket, GatheredUnit, plan_buckets
from jddp.reduce.shards import Exchange, Groups, Shape

CALLS = {"jit", "pjit", "closed_call", "core_call"}
REMAT = {"checkpoint", "remat2", "remat"}


@dataclasses.dataclass(frozen=True)
class Part:
    """A replica's part of a parameter.

    Attributes:
      value: The part, in the parameter's dtype.
      dim: Dim along which the parameter is divided.
      shape: Shape of the whole parameter.
      cast: Narrower dtype to which the program has cast the parameter; None for its own dtype.
      whole: Function that returns the whole parameter; None outside of a program.
      name: Path of the parameter, for plans.
    """

    value: Shaped
    dim: int
    shape: Shape
    cast: np.dtype | None = None
    whole: Callable[[], jax.Array] | None = None
    name: str = ""

    @property
    def array(self) -> jax.Array:
        """The part, in a program."""
        assert isinstance(self.value, jax.Array)
        return self.value

    def gathered(self) -> jax.Array:
        """The whole parameter, in a program."""
        assert self.whole is not None
        return self.whole()

    @property
    def dtype(self) -> np.dtype:
        """Dtype in which the program sees the parameter."""
        return self.cast or np.dtype(self.value.dtype)

    def sliced(self, value: Shaped) -> "Part":
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
    """Returns the units of a program; their `leaves` are places among its inputs.

    Each parameter that the program needs whole stands in exactly one unit.

    Args:
      jaxpr: The program.
      given: Inputs of the program; a `Part` in the place of a whole parameter.
      unit_bytes: Largest sizes of units, like sizes of buckets.
    """
    parts = {i: x for i, x in enumerate(given) if isinstance(x, Part)}
    first: dict[int, int] = {}
    seen: dict[int, set[np.dtype]] = {i: set() for i in parts}
    for num, (eqn, used) in enumerate(takers(jaxpr, given)):
        for i, x in used.items():
            if needs_whole(eqn, i, x.part):
                first.setdefault(x.place, num)
                seen[x.place].add(x.part.dtype)
    # A parameter that is seen in several dtypes is gathered once, in its own dtype.
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
      given: Inputs of the program, as for `plan_units`; parts may be shapes.
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
    """Yields equations that take parameters, inside calls too, with the parameters by operand."""
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
    if eqn.primitive.name != "convert_element_type" or not isinstance(x, Part):
        return False
    if x.cast is not None:  # Two casts round twice; one cast to the last dtype would not.
        return False
    old, new = np.dtype(x.value.dtype), np.dtype(eqn.params["new_dtype"])
    are_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return are_floats and new.itemsize < old.itemsize


def needs_whole(eqn: JaxprEqn, operand: int, x: Part) -> bool:
    """Whether an equation needs a parameter whole, and does not gather it itself."""
    if eqn.primitive.name in REMAT:
        return False
    return eqn.primitive.name != "scan" or operand < carried(eqn)[1] or x.dim == 0


UNIT = "unit_of_"  # Beginning of the scopes of a unit's collectives.
BETWEEN = f"{UNIT}gradients_between_groups"
# Name of calls whose results are not kept for a backward pass.
FORGOTTEN = "made_of_parameters"


@dataclasses.dataclass(frozen=True)
class Gather:
    """Gathers the parameters of a unit, and averages their gradients.

    Attributes:
      axis: Name of the mapped axis.
      exchange: How the replicas of a group exchange rows.
      groups: Groups of replicas that divide parameters.
      wire_dtype: Dtype to which wider gradients are cast on the wire, or None.
    """

    axis: str
    exchange: Exchange
    groups: Groups
    wire_dtype: np.dtype | None = None

    def __call__(
        self, parts: Sequence[jax.Array], dims: Sequence[int], dtype: np.dtype
    ) -> list[jax.Array]:
        """Gathers arrays of one dtype.

        Args:
          parts: This replica's parts.
          dims: Dim along which each array is divided.
          dtype: Dtype in which they are gathered; the results have the dtype of the parts.
        """
        shapes = [x.shape for x in parts]
        own = parts[0].dtype

        def gather(*parts: jax.Array) -> tuple[jax.Array, ...]:
            with jax.named_scope(f"{UNIT}parameters"):
                rows = self.exchange.gather(_joined(parts).astype(dtype), self.axis)
                wholes = map(_merged, _cut(rows, shapes), dims)
                # The program casts them again at once, and XLA drops both casts. So gradients come
                # back in the parameters' own dtype, and are averaged in it.
                return tuple(x.astype(own) for x in wholes)

        def forward(*parts: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[()]]:
            return forgotten(gather)(*parts), ()

        def backward(_: tuple[()], grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(self._mean_parts(grads, dims, shapes))

        return [*forgotten(gather, forward, backward)(*parts)]

    def mean_of_groups(
        self, parts: Sequence[jax.Array], bucket_bytes: tuple[int, ...]
    ) -> list[jax.Array]:
        """The means over all groups of a replica's parts, with one all-reduce for each bucket.

        Args:
          parts: Parts of the mean gradients of the replica's group.
          bucket_bytes: Largest sizes of buckets.
        """
        means, peers = [*parts], self.groups.peers
        plan = plan_buckets(means, bucket_bytes=bucket_bytes, wire_dtype=self.wire_dtype)
        average = functools.partial(jax.lax.pmean, axis_index_groups=peers)
        for bucket in plan.buckets:
            with jax.named_scope(BETWEEN):
                row = _joined([parts[i] for i in bucket.leaves]).astype(bucket.wire_dtype)
                row = mean_over(self.axis, row, average).astype(bucket.dtype)
            for i, x in zip(bucket.leaves, _cut(row[None], bucket.shapes), strict=True):
                means[i] = x[0]
        return means

    def _mean_parts(
        self, grads: Sequence[jax.Array], dims: Sequence[int], shapes: Sequence[Shape]
    ) -> list[jax.Array]:
        num, dtype = self.groups.size, grads[0].dtype
        with jax.named_scope(f"{UNIT}gradients"):
            divided = [_divided(x, dim, num) for x, dim in zip(grads, dims, strict=True)]
            rows = jnp.concatenate([x.reshape(num, -1) for x in divided], axis=1)
            narrow = self.wire_dtype is not None and self.wire_dtype.itemsize < dtype.itemsize
            rows = rows.astype(self.wire_dtype) if narrow else rows
            row = mean_over(self.axis, rows, self.exchange.mean).astype(dtype)
        return [x[0] for x in _cut(row.reshape(1, -1), shapes)]


def forgotten(
    function: Callable[..., Tree],
    forward: Callable[..., tuple[Tree, PyTree]] | None = None,
    backward: Callable[..., tuple[PyTree, ...]] | None = None,
) -> Callable[..., Tree]:
    """Makes a function one call; its name shows to a policy that its results are not kept.

    Args:
      function: Function of arrays.
      forward: The forward pass, as for `jax.custom_vjp`; None for a call inside a forward pass: it
        is not differentiated.
      backward: The backward pass.
    """

    def call(*given: jax.Array) -> Tree:
        return function(*given)

    call.__name__ = FORGOTTEN
    opaque = jax.custom_vjp(call)
    opaque.defvjp(forward or _never, backward or _never)
    return opaque


def _never(*_: PyTree) -> NoReturn:
    raise AssertionError("a call inside a forward pass is not differentiated")


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in parts])


def _cut(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Cuts rows, in which arrays stand side by side, into arrays (replicas, ...)."""
    ends = [*itertools.accumulate(map(math.prod, shapes))]
    pieces = jnp.split(rows, ends[:-1], axis=1)
    return [x.reshape(len(rows), *shape) for x, shape in zip(pieces, shapes, strict=True)]


def _merged(parts: jax.Array, dim: int) -> jax.Array:
    """A whole array, from the parts along a dim: (replicas, ...)."""
    num, *shape = parts.shape
    shape[dim] *= num
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _divided(x: jax.Array, dim: int, num: int) -> jax.Array:
    """The parts of a whole array along a dim, (replicas, ...); the inverse of `_merged`."""
    shape = (*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)
