"""Evaluates a traced program with divided parameters, and gathers each where it is first used.

    lazy = Lazy(gather, unit_bytes, keeps=False)
    results = lazy.evaluate(traced, [Part(...), ..., rows], made)

The program was traced for whole parameters, and knows nothing of it. Parameters are gathered in
units (`jddp.reduce.units`). A parameter that a scan slices is gathered in the body of the scan,
a slice at a time. A parameter that a loop or a branch takes whole is gathered before it.

Values made of parameters alone are not kept from the forward to the backward pass: parameters are
gathered, cast and transposed again; so are complex values. All others are kept as JAX keeps them.
`forget` is the policy by which `jax.checkpoint` repeats those calls. JAX would apply it to regions
that a model itself recomputes (`nn.remat`) too, and keep all of their values; so such a region
becomes one call with a backward pass of its own.

A call has a gradient for each of its results, but the results of a `while` loop, for example, have
none. So values without a gradient are followed (`Origin`), as JAX differentiates the program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.typing import ArrayLike

from jddp.ground.jaxprs import carried
from jddp.ground.typing import PyTree, Tree
from jddp.reduce import units
from jddp.reduce.backward import evaluate, variables
from jddp.reduce.units import Part

# The sources of a value: no divided parameter, divided parameters alone, or anything.
CONSTANT, PARAMETERS, ANYTHING = range(3)
Value = ArrayLike | Part  # The value of a variable.


class Origin(NamedTuple):
    """The inputs from which a value is computed.

    Attributes:
      source: CONSTANT, PARAMETERS or ANYTHING.
      moves: Whether it may have a gradient.
    """

    source: int
    moves: bool


NO_ORIGIN = Origin(CONSTANT, moves=False)


def forget(primitive: Primitive, *avals: PyTree, **params: PyTree) -> bool:
    """A policy of `jax.checkpoint`: keeps all real values except values of parameters alone."""
    # `jax.checkpoint` rounds the values that it keeps, and cannot round complex numbers.
    dtypes = (params.get("new_dtype"), *(getattr(x, "dtype", None) for x in avals))
    if primitive.name in ("complex", "fft") or {np.dtype("c8"), np.dtype("c16")} & {*dtypes}:
        return False
    called = params.get("call_jaxpr")
    if not isinstance(called, ClosedJaxpr) or not primitive.name.startswith("custom_vjp_call"):
        return primitive.name != "stop_gradient"  # It equals its operand.
    return units.FORGOTTEN not in called.jaxpr.debug_info.func_name


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An evaluation with parameters that are gathered where they are used.

    Attributes:
      gather: Function that gathers a unit.
      unit_bytes: Largest sizes of units, like sizes of buckets.
      keeps: Whether gathered parameters are kept for the backward pass.
    """

    gather: units.Gather
    unit_bytes: tuple[int, ...]
    keeps: bool

    def evaluate(
        self, program: ClosedJaxpr, given: Sequence[Value], made: Sequence[Origin]
    ) -> list[ArrayLike]:
        """Evaluates a program.

        Args:
          program: The program.
          given: Inputs of the program; a `Part` in the place of a whole parameter.
          made: The origin of each input.
        """
        results, _ = self._evaluate(program, self._in_units(program.jaxpr, given), made)
        return [*map(_whole, results)]

    def _evaluate(
        self, program: ClosedJaxpr, given: Sequence[Value], made: Sequence[Origin]
    ) -> tuple[list[Value], list[Origin]]:
        """Results, some of them parts, and their origins."""
        jaxpr = program.jaxpr
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        values: dict[Var, Value] = dict(zip(inputs, (*program.consts, *given), strict=True))
        origins = dict.fromkeys(jaxpr.constvars, Origin(ANYTHING, moves=False))
        origins |= zip(jaxpr.invars, made, strict=True)

        def read(v: Var | Literal) -> Value:
            return v.val if isinstance(v, Literal) else values[v]

        def origin(v: Var | Literal) -> Origin:
            return NO_ORIGIN if isinstance(v, Literal) else origins[v]

        for eqn in jaxpr.eqns:
            ins, of = [*map(read, eqn.invars)], [*map(origin, eqn.invars)]
            joined = Origin(*map(max, zip(*of, strict=True))) if of else NO_ORIGIN
            results = [joined] * len(eqn.outvars)
            name, has_parts = eqn.primitive.name, any(isinstance(x, Part) for x in ins)
            outs: Sequence[Value]
            if name in units.CALLS and PARAMETERS in [x.source for x in of]:
                outs, results = self._evaluate(eqn.params["jaxpr"], ins, of)
            elif name in units.REMAT and has_parts:
                outs = self._repeated(eqn, ins, of)
            elif name == "scan" and has_parts:
                outs = self._scan(eqn, ins, of)
            elif ins and isinstance(ins[0], Part) and units.is_narrowing(eqn, ins[0]):
                outs = [self._cast(ins[0], eqn.params["new_dtype"])]
            elif not self.keeps and _is_made_again(eqn, joined):
                fixed = [v for v in variables(eqn) if not origins[v].moves]
                outs, moving = _remade(jaxpr, eqn, values, fixed)
                results = [Origin(joined.source, i in moving) for i in range(len(outs))]
            else:
                outs = _applied(jaxpr, eqn, values)
            values |= zip(eqn.outvars, outs, strict=True)
            origins |= zip(eqn.outvars, results, strict=True)
        return [*map(read, jaxpr.outvars)], [*map(origin, jaxpr.outvars)]

    def _scan(self, eqn: JaxprEqn, ins: list[Value], of: list[Origin]) -> list[ArrayLike]:
        """Results of a scan that gathers slices of parameters in its body."""
        first, last = carried(eqn)
        slices = [x if isinstance(x, Part) and x.dim > 0 else _whole(x) for x in ins[last:]]
        consts, carry = ([*map(_whole, x)] for x in (ins[:first], ins[first:last]))
        # A loop may carry values of any source, whatever they begin with.
        made = [*of[:first], *[Origin(ANYTHING, moves=True)] * (last - first), *of[last:]]

        def layer(*given: jax.Array) -> list[ArrayLike]:
            fixed = _fixed(given, made)
            own = [
                x.sliced(value) if isinstance(x, Part) else value
                for x, value in zip(slices, fixed[last:], strict=True)
            ]
            return self.evaluate(eqn.params["jaxpr"], [*fixed[:last], *own], made)

        run: Callable[..., list[ArrayLike]] = layer
        if not self.keeps:
            # Without this the backward pass would begin with a scan that gathers and keeps all
            # slices.
            run = _repeating(layer, forget, prevent_cse=False)

        def body(
            carry: list[ArrayLike], values: list[ArrayLike]
        ) -> tuple[list[ArrayLike], list[ArrayLike]]:
            # The carry is kept as the loop gets it: one more scan would copy it from its results.
            carry = [checkpoint_name(x, "carried") for x in carry]
            results = run(*consts, *carry, *values)
            return results[: last - first], results[last - first :]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(body, carry, [*map(_own, slices)], **options)
        return [*carry, *stacked]

    def _repeated(self, eqn: JaxprEqn, ins: list[Value], of: list[Origin]) -> list[ArrayLike]:
        """Results of a region that the model recomputes, with a backward pass of its own."""
        params = eqn.params
        program, policy = ClosedJaxpr(params["jaxpr"], ()), params["policy"]

        def region(*values: jax.Array) -> list[ArrayLike]:
            own = [
                dataclasses.replace(x, value=value) if isinstance(x, Part) else value
                for x, value in zip(ins, _fixed(values, of), strict=True)
            ]
            return self.evaluate(program, own, of)

        def keep(primitive: Primitive, *avals: PyTree, **about: PyTree) -> bool:
            is_kept = policy is not None and forget(primitive, *avals, **about)
            return is_kept and policy(primitive, *avals, **about)

        repeating = _repeating(region, keep, prevent_cse=params["prevent_cse"])
        return repeating(*map(_own, ins))

    def _in_units(self, jaxpr: Jaxpr, given: Sequence[Value]) -> list[Value]:
        """The inputs of a program, with parts that can be gathered."""
        found = [*given]
        parts = {i: x for i, x in enumerate(given) if isinstance(x, Part)}
        plan = units.plan_units(jaxpr, given, self.unit_bytes)
        gathered = [(x.leaves, x.wire_dtype) for x in plan]
        used = {i for places, _ in gathered for i in places}
        # A parameter that no equation uses may still be a result.
        gathered += [((i,), x.dtype) for i, x in parts.items() if i not in used]
        for places, dtype in gathered:
            arrays, dims = [parts[i].array for i in places], [parts[i].dim for i in places]
            gather = functools.cache(functools.partial(self.gather, arrays, dims, dtype))
            for at, i in enumerate(places):
                own = dataclasses.replace(parts[i], cast=None, whole=_entry(gather, at))
                narrow = parts[i].cast
                found[i] = own if narrow is None else self._cast(own, narrow)
        return found

    def _cast(self, x: Part, dtype: np.dtype) -> Part:
        """The part of a parameter that the program casts."""

        def cast(x: jax.Array) -> list[jax.Array]:
            return [x.astype(dtype)]

        run = cast if self.keeps else _made_again(cast)
        # The cast runs once, like its equation: gradients are added up in the narrow dtype.
        return dataclasses.replace(
            x, cast=dtype, whole=functools.cache(lambda: run(x.gathered())[0])
        )


def _entry(gather: Callable[[], list[jax.Array]], at: int) -> Callable[[], jax.Array]:
    return lambda: gather()[at]


def _whole(x: Value) -> ArrayLike:
    return x.gathered() if isinstance(x, Part) else x


def _own(x: Value) -> ArrayLike:
    return x.array if isinstance(x, Part) else x


def _repeating(
    region: Callable[..., list[ArrayLike]], policy: Callable[..., bool], *, prevent_cse: bool
) -> Callable[..., list[ArrayLike]]:
    """Makes a region one call, whose own backward pass repeats the values that are not kept."""
    repeated = jax.checkpoint(region, policy=policy, prevent_cse=prevent_cse)
    call = jax.custom_vjp(lambda *values: repeated(*values))
    call.defvjp(functools.partial(jax.vjp, repeated), lambda pullback, grads: pullback(grads))
    return call


def _is_made_again(eqn: JaxprEqn, joined: Origin) -> bool:
    """Whether the results of an equation are not kept for the backward pass."""
    are_arrays = [isinstance(v.aval, jax.core.ShapedArray) for v in (*eqn.invars, *eqn.outvars)]
    # A reference is no result of a call.
    return joined.source == PARAMETERS and bool(eqn.outvars) and all(are_arrays)


def _applied(jaxpr: Jaxpr, eqn: JaxprEqn, values: Mapping[Var, Value]) -> list[ArrayLike]:
    """Results of an equation for whole parameters."""
    wholes = {v: _whole(values[v]) for v in variables(eqn)}
    # Named values are kept. Without them the backward pass would repeat the equation, and JAX would
    # call the host again.
    if eqn.primitive.name.startswith("debug_"):
        wholes = {v: checkpoint_name(x, "shown") for v, x in wholes.items()}
    outs: list[ArrayLike] = [*evaluate(jaxpr, [eqn], wholes).values()]
    # Without a name for its results, JAX would run a loop again under any policy.
    return [checkpoint_name(x, "end") for x in outs] if eqn.primitive.name == "while" else outs


def _remade(
    jaxpr: Jaxpr, eqn: JaxprEqn, values: Mapping[Var, Value], fixed: Sequence[Var]
) -> tuple[list[ArrayLike], set[int]]:
    """Results of an equation that are not kept for the backward pass, and which of them move.

    Args:
      jaxpr: The program.
      eqn: One of its equations.
      values: Values of variables.
      fixed: Variables of the equation without a gradient.
    """
    names = dict.fromkeys(variables(eqn))

    def run(*ins: ArrayLike) -> list[ArrayLike]:
        given = dict(zip(names, ins, strict=True))
        given |= {v: jax.lax.stop_gradient(given[v]) for v in fixed}
        return [*evaluate(jaxpr, [eqn], given).values()]

    wholes = [_whole(values[v]) for v in names]
    moving = _moving(run, wholes)
    outs = enumerate(_made_again(run)(*wholes))
    # A call has a gradient for each result; `stop_gradient` drops it where the equation has none.
    return [x if i in moving else jax.lax.stop_gradient(x) for i, x in outs], moving


def _moving(run: Callable[..., list[ArrayLike]], given: Sequence[ArrayLike]) -> set[int]:
    """The results of a function that have a gradient, as JAX differentiates it."""
    moving = set[int]()

    def watched(i: int, x: ArrayLike) -> ArrayLike:
        same = jax.custom_jvp(lambda x: x)

        def moved(
            ins: tuple[ArrayLike], tangents: tuple[ArrayLike]
        ) -> tuple[ArrayLike, ArrayLike]:  # JAX calls it only with tangents.
            moving.add(i)
            return ins[0], tangents[0]

        same.defjvp(moved)
        return same(x)

    def watch(*ins: ArrayLike) -> list[ArrayLike]:
        return [watched(i, x) for i, x in enumerate(run(*ins))]

    jax.eval_shape(lambda *ins: jax.vjp(watch, *ins)[0], *given)
    return moving


def _fixed(values: Sequence[jax.Array], made: Sequence[Origin]) -> tuple[jax.Array, ...]:
    """The inputs of a program; the backward pass leaves out those without a gradient."""
    both = zip(values, made, strict=True)
    return tuple(x if of.moves else jax.lax.stop_gradient(x) for x, of in both)


def _made_again(run: Callable[..., Tree]) -> Callable[..., Tree]:
    """Makes a function of parameters alone a call; the backward pass keeps no results of it."""
    return units.forgotten(
        run,
        lambda *given: (units.forgotten(run)(*given), given),
        lambda given, grads: jax.vjp(run, *given)[1](grads),
    )
