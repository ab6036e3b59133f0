"""Evaluates a traced program with divided parameters, and gathers each where it is first used.

    lazy = Lazy(gather, unit_bytes, keeps=False)
    results = lazy.evaluate(traced, [Part(...), ..., rows], made)

The program was traced for whole parameters, and knows nothing of it. Parameters are gathered in
units (`jddp.reduce.unit_plan`). A parameter that a scan slices is gathered in the body of the scan,
a slice at a time; one that a loop or a branch takes whole is gathered before it.

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
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jddp.jaxprs import carried
from jddp.reduce.backward import evaluate, variables
from jddp.reduce.unit_plan import CALLS, REMAT, Part, is_narrowing, plan_units
from jddp.reduce.units import FORGOTTEN, Gather, forgotten
from jddp.typing import PyTree

# The sources of a value: no divided parameter, divided parameters alone, or anything.
CONSTANT, PARAMETERS, ANYTHING = range(3)


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
            elif has_parts and is_narrowing(eqn, ins[0]):
                outs = [self._cast(ins[0], eqn.params["new_dtype"])]
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

        def layer(*given: PyTree) -> list[PyTree]:
            own = [
                x.sliced(value) if isinstance(x, Part) else value
                for x, value in zip(slices, given[last:], strict=True)
            ]
            return self.evaluate(eqn.params["jaxpr"], [*given[:last], *own], made)

        if not self.keeps:
            # Else the backward pass begins with a scan that gathers all slices, and keeps them.
            layer = _repeating(layer, forget, prevent_cse=False)

        def body(carry: list[PyTree], values: list[PyTree]) -> tuple[list[PyTree], list[PyTree]]:
            # Kept as it comes in: else one more scan copies it from what goes out.
            carry = [checkpoint_name(x, "carried") for x in carry]
            results = layer(*consts, *carry, *values)
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

        repeating = _repeating(region, keep, prevent_cse=params["prevent_cse"])
        return repeating(*map(_own, ins))

    def _in_units(self, jaxpr: Jaxpr, given: Sequence[PyTree]) -> list[PyTree]:
        """The inputs of a program, with parts that can be gathered."""
        found = [*given]
        units = [(x.leaves, x.wire_dtype) for x in plan_units(jaxpr, given, self.unit_bytes)]
        used = {i for places, _ in units for i in places}
        # A parameter that no equation uses may still be a result.
        units += [
            ((i,), x.dtype) for i, x in enumerate(given) if isinstance(x, Part) and i not in used
        ]
        for places, dtype in units:
            gather = functools.cache(
                functools.partial(self._gather, [given[i] for i in places], dtype)
            )
            for at, i in enumerate(places):
                own = dataclasses.replace(
                    given[i], cast=None, whole=lambda at=at, gather=gather: gather()[at]
                )
                found[i] = own if given[i].cast is None else self._cast(own, given[i].cast)
        return found

    def _gather(self, parts: Sequence[Part], dtype: np.dtype) -> list[jax.Array]:
        return self.gather([x.value for x in parts], [x.dim for x in parts], dtype)

    def _cast(self, x: Part, dtype: np.dtype) -> Part:
        """The part of a parameter that the program casts."""

        def cast(x: jax.Array) -> list[jax.Array]:
            return [x.astype(dtype)]

        run = cast if self.keeps else _made_again(cast)
        # Once, as the equation that casts: what comes back is added up in the narrow dtype.
        return dataclasses.replace(x, cast=dtype, whole=functools.cache(lambda: run(_whole(x))[0]))


def _whole(x: PyTree) -> PyTree:
    if not isinstance(x, Part):
        return x
    assert x.whole is not None  # it is in a program
    return x.whole()


def _own(x: PyTree) -> PyTree:
    return x.value if isinstance(x, Part) else x


def _repeating(
    region: Callable[..., list[PyTree]], policy: Callable[..., PyTree], *, prevent_cse: bool
) -> Callable[..., list[PyTree]]:
    """The region as one call with a backward pass of its own, which repeats what is not kept."""
    repeated = jax.checkpoint(region, policy=policy, prevent_cse=prevent_cse)
    call = jax.custom_vjp(lambda *values: repeated(*values))
    call.defvjp(functools.partial(jax.vjp, repeated), lambda pullback, grads: pullback(grads))
    return call


def _made_again(run: Callable[..., list[PyTree]]) -> Callable[..., list[PyTree]]:
    """A function of parameters alone, whose results are not kept for the backward pass."""
    return forgotten(
        run,
        lambda *given: (forgotten(run)(*given), given),
        lambda given, grads: jax.vjp(run, *given)[1](grads),
    )
