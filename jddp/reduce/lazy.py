"""Evaluates a traced program with divided parameters, and gathers each where it is first used.

    lazy = Lazy(gather, unit_bytes, keeps=False)
    results = lazy.evaluate(traced, [Part(...), ..., rows], made)

The program was traced for whole parameters, and knows nothing of it. Parameters are gathered in
units, in the order of their first use. A parameter that a scan slices is gathered in the body of
the scan, a slice at a time; one that a loop or a branch takes whole is gathered before it.

Values made of parameters alone are not kept from the forward to the backward pass: parameters are
gathered, cast and transposed again. All other values are kept as JAX keeps them. `forget` is the
policy by which `jax.checkpoint` repeats those calls. JAX would apply it to regions that a model
itself recomputes (`nn.remat`) too, and keep all of their values; so such a region becomes one call
with a backward pass of its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jddp.jaxprs import carried
from jddp.reduce.backward import evaluate, variables
from jddp.reduce.plan import plan_buckets
from jddp.reduce.shards import Shape
from jddp.reduce.units import FORGOTTEN, Gather, forgotten
from jddp.typing import PyTree

CALLS = {"jit", "pjit", "closed_call", "core_call"}
REMAT = {"checkpoint", "remat2", "remat"}
# The sources of a value: no divided parameter, divided parameters alone, or anything.
CONSTANT, PARAMETERS, ANYTHING = range(3)


@dataclasses.dataclass(frozen=True)
class Part:
    """A replica's part of a parameter.

    Attributes:
      value: The part.
      dim: Dim along which the parameter is divided.
      shape: Shape of the whole parameter.
      whole: Function that returns the whole parameter; None outside of a program.
    """

    value: jax.Array
    dim: int
    shape: Shape
    whole: Callable[[], jax.Array] | None = None

    def sliced(self, value: jax.Array) -> "Part":
        """A slice along the first dim, which is not the divided one."""
        return Part(value, self.dim - 1, self.shape[1:])


def forget(primitive: PyTree, *_: PyTree, **params: PyTree) -> bool:
    """A policy of `jax.checkpoint`: keeps all values but those made of parameters alone."""
    called = params.get("call_jaxpr")
    if called is None or not primitive.name.startswith("custom_vjp_call"):
        return True
    return FORGOTTEN not in called.jaxpr.debug_info.func_name


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An evaluation with parameters that are gathered where they are used.

    Attributes:
      gather: How a unit is gathered.
      unit_bytes: Largest sizes of units, as those of buckets.
      keeps: Whether gathered parameters are kept for the backward pass.
    """

    gather: Gather
    unit_bytes: tuple[int, ...]
    keeps: bool

    def evaluate(
        self, program: ClosedJaxpr, given: Sequence[PyTree], made: Sequence[int]
    ) -> list[PyTree]:
        """Evaluates a program.

        Args:
          program: The program.
          given: Inputs of the program; a `Part` in the place of a whole parameter.
          made: A kind for each input, what it is made of.
        """
        results, _ = self._evaluate(program, self._in_units(program.jaxpr, given), made)
        return [*map(_whole, results)]

    def _evaluate(
        self, program: ClosedJaxpr, given: Sequence[PyTree], made: Sequence[int]
    ) -> tuple[list[PyTree], list[int]]:
        """Results, some of which may be parts, and their sources."""
        jaxpr = program.jaxpr
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(inputs, (*program.consts, *given), strict=True))
        kinds = dict.fromkeys(jaxpr.constvars, ANYTHING) | dict(
            zip(jaxpr.invars, made, strict=True)
        )

        def read(v: Var | Literal) -> PyTree:
            return v.val if isinstance(v, Literal) else values[v]

        def kind(v: Var | Literal) -> int:
            return CONSTANT if isinstance(v, Literal) else kinds[v]

        for eqn in jaxpr.eqns:
            ins, of = [*map(read, eqn.invars)], [*map(kind, eqn.invars)]
            results = [max(of, default=CONSTANT)] * len(eqn.outvars)
            name, has_parts = eqn.primitive.name, any(isinstance(x, Part) for x in ins)
            if name in CALLS and PARAMETERS in of:
                outs, results = self._evaluate(eqn.params["jaxpr"], ins, of)
            elif name in REMAT and has_parts:
                outs = self._repeated(eqn, ins, of)
            elif name == "scan" and has_parts:
                outs = self._scan(eqn, ins, of)
            else:
                outs = self._apply(jaxpr, eqn, values, is_pure=results[:1] == [PARAMETERS])
            values |= zip(eqn.outvars, outs, strict=True)
            kinds |= zip(eqn.outvars, results, strict=True)
        return [*map(read, jaxpr.outvars)], [*map(kind, jaxpr.outvars)]

    def _apply(
        self, jaxpr: Jaxpr, eqn: JaxprEqn, values: dict[Var, PyTree], *, is_pure: bool
    ) -> list[PyTree]:
        """Results of an equation for whole parameters."""
        given = dict.fromkeys(variables(eqn))

        def run(*ins: jax.Array) -> list[jax.Array]:
            return [*evaluate(jaxpr, [eqn], dict(zip(given, ins, strict=True))).values()]

        wholes = [_whole(values[v]) for v in given]
        if self.keeps or not is_pure:
            return run(*wholes)
        if eqn.primitive.name == "stop_gradient":
            # Before the call, or what follows would seem to have a gradient: loops may have none.
            wholes = [*map(lax.stop_gradient, wholes)]
        return _made_again(run)(*wholes)

    def _scan(self, eqn: JaxprEqn, ins: list[PyTree], of: list[int]) -> list[PyTree]:
        """Results of a scan, in whose body slices of parameters are gathered."""
        first, last = carried(eqn)
        slices = [x if isinstance(x, Part) and x.dim > 0 else _whole(x) for x in ins[last:]]
        consts, carry = ([*map(_whole, x)] for x in (ins[:first], ins[first:last]))
        # A loop may carry values of any source, whatever they begin with.
        made = [*of[:first], *[ANYTHING] * (last - first), *of[last:]]

        def body(carry: list[PyTree], values: list[PyTree]) -> tuple[list[PyTree], list[PyTree]]:
            own = [
                x.sliced(value) if isinstance(x, Part) else value
                for x, value in zip(slices, values, strict=True)
            ]
            results = self.evaluate(eqn.params["jaxpr"], [*consts, *carry, *own], made)
            return results[: last - first], results[last - first :]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(body, carry, [*map(_own, slices)], **options)
        return [*carry, *stacked]

    def _repeated(self, eqn: JaxprEqn, ins: list[PyTree], of: list[int]) -> list[PyTree]:
        """Results of a region that the model recomputes, with a backward pass of its own."""
        params = eqn.params
        program, policy = ClosedJaxpr(params["jaxpr"], ()), params["policy"]

        def region(*values: PyTree) -> list[PyTree]:
            own = [
                dataclasses.replace(x, value=value) if isinstance(x, Part) else value
                for x, value in zip(ins, values, strict=True)
            ]
            return self.evaluate(program, own, of)

        def keep(primitive: PyTree, *avals: PyTree, **about: PyTree) -> PyTree:
            if policy is None or not forget(primitive, *avals, **about):
                return False
            return policy(primitive, *avals, **about)

        repeated = jax.checkpoint(region, policy=keep, prevent_cse=params["prevent_cse"])
        call = jax.custom_vjp(lambda *values: repeated(*values))
        call.defvjp(functools.partial(jax.vjp, repeated), lambda pullback, grads: pullback(grads))
        return call(*map(_own, ins))

    def _in_units(self, jaxpr: Jaxpr, given: Sequence[PyTree]) -> list[PyTree]:
        """The inputs of a program, with parts that can be gathered."""
        found = [*given]
        places = [i for i, x in enumerate(given) if isinstance(x, Part)]
        first = first_uses(jaxpr, {jaxpr.invars[i]: given[i].dim for i in places})
        shapes = [jax.ShapeDtypeStruct(given[i].shape, given[i].value.dtype) for i in places]
        ready = [first.get(jaxpr.invars[i]) for i in places]
        plan = plan_buckets(shapes, bucket_bytes=self.unit_bytes, ready=ready)
        # A parameter that no equation uses may still be a result.
        rest = {*range(len(places))}.difference(*(bucket.leaves for bucket in plan.buckets))
        for members in (*(bucket.leaves for bucket in plan.buckets), *((i,) for i in sorted(rest))):
            own = [places[i] for i in members]
            unit = functools.cache(functools.partial(self._gather, [given[i] for i in own]))
            for at, i in enumerate(own):
                found[i] = dataclasses.replace(given[i], whole=lambda at=at, unit=unit: unit()[at])
        return found

    def _gather(self, parts: Sequence[Part]) -> list[jax.Array]:
        return self.gather([x.value for x in parts], [x.dim for x in parts])


def first_uses(jaxpr: Jaxpr, dims: dict[Var, int]) -> dict[Var, int]:
    """Numbers of the equations that first need parameters whole, by variable.

    A region that is recomputed, and the body of a scan over a parameter, gather it themselves.

    Args:
      jaxpr: The program.
      dims: Dim along which each parameter is divided.
    """
    found: dict[Var, int] = {}
    num = 0

    def visit(jaxpr: Jaxpr, names: dict[Var, Var]) -> None:
        nonlocal num
        for eqn in jaxpr.eqns:
            num += 1
            name = eqn.primitive.name
            used = {
                i: names[v]
                for i, v in enumerate(eqn.invars)
                if not isinstance(v, Literal) and v in names
            }
            if name in CALLS:
                inner = eqn.params["jaxpr"].jaxpr
                visit(inner, {inner.invars[i]: v for i, v in used.items()})
            elif name not in REMAT:
                last = carried(eqn)[1] if name == "scan" else len(eqn.invars)
                for i, v in used.items():
                    if i < last or dims[v] == 0:
                        found.setdefault(v, num)

    visit(jaxpr, {v: v for v in dims})
    return found


def _whole(x: PyTree) -> PyTree:
    if not isinstance(x, Part):
        return x
    assert x.whole is not None  # it is in a program
    return x.whole()


def _own(x: PyTree) -> PyTree:
    return x.value if isinstance(x, Part) else x


def _made_again(run: Callable[..., list[PyTree]]) -> Callable[..., list[PyTree]]:
    """A function of parameters alone, whose results are not kept for the backward pass."""
    return forgotten(
        run,
        lambda *given: (forgotten(run)(*given), given),
        lambda given, grads: jax.vjp(run, *given)[1](grads),
    )
