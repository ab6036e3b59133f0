"""Facts read from the equations of a traced program, and of the programs inside it.

A loop, a branch and a jitted function are one equation each, with programs inside. `equations`
walks into all of them, and `follow` follows values through them. The text of a program is no place
to look: it also holds the names of functions, and these can be anything.

This room knows equations, and nothing of models or steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Primitives that make random numbers. `random_split` and others make only keys.
DRAWING = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}
LOOPS = {"scan", "while"}
PRODUCTS = {"dot_general", "conv_general_dilated"}
_Found = TypeVar("_Found")
# Function from an equation and its inputs' labels to its results' labels; None if it cannot tell.
Rule = Callable[[JaxprEqn, list[int]], list[int] | None]
EXACT = ((lax.Precision.HIGHEST,) * 2, lax.DotAlgorithmPreset.F32_F32_F32)


def jaxprs_in_params(params: Mapping[str, object]) -> Iterator[Jaxpr]:
    """The programs among the parameters of an equation; JAX has such a function from 0.10 on."""
    for value in params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, each before the equations of the programs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that an equation runs once, on its own inputs; None if it has none.

    A jitted function has such a program. The body of a loop or of a reduction is none.
    """
    for inner in jaxprs_in_params(eqn.params):
        own, given = (*inner.invars, *inner.outvars), (*eqn.invars, *eqn.outvars)
        if eqn.primitive.name not in LOOPS and [*map(aval_shape, own)] == [*map(aval_shape, given)]:
            return inner
    return None


def carried(scan: JaxprEqn) -> tuple[int, int]:
    """Where the carry of a scan begins and ends among its inputs: after constants, before slices.

    Shapes tell it, since JAX versions name the numbers of inputs differently: a step gets a slice
    of an array over which the scan runs, and any other input whole.
    """
    (body,) = jaxprs_in_params(scan.params)
    num_sliced = sum(
        aval_shape(x) != aval_shape(v) for x, v in zip(scan.invars, body.invars, strict=True)
    )
    results = zip(scan.outvars, body.outvars, strict=True)
    num_carried = sum(aval_shape(x) == aval_shape(v) for x, v in results)
    last = len(scan.invars) - num_sliced
    return last - num_carried, last


def axes_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The axes that an equation works over: names of mapped axes, and numbers of dims."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def has_random_bits(jaxpr: Jaxpr) -> bool:
    """Whether a program uses random numbers."""
    return any(eqn.primitive.name in DRAWING for eqn in equations(jaxpr))


def dtypes(jaxpr: Jaxpr) -> set[object]:
    """The dtypes of all inputs and results of a program's equations, random keys included."""
    variables = (v for eqn in equations(jaxpr) for v in (*eqn.invars, *eqn.outvars))
    return {v.aval.dtype for v in variables if hasattr(v.aval, "dtype")}


def products(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """All products and convolutions, in their order."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]


def coarse_products(jaxpr: Jaxpr) -> bool:
    """Whether a float32 product or convolution allows hardware to round its factors."""
    return any(map(may_round, products(jaxpr)))


def may_round(product: JaxprEqn) -> bool:
    """Whether both factors are float32, and hardware may round them.

    Hardware may round at any precision but the highest; a precision that is not set is None.
    """
    is_exact = product.params.get("precision") in EXACT
    return {dtype_of(v) for v in product.invars[:2]} == {np.dtype(np.float32)} and not is_exact


def aval_shape(v: Var | Literal) -> tuple[int, ...]:
    """The shape of a variable or number; () if it is not an array."""
    return getattr(v.aval, "shape", ())


def dtype_of(v: Var | Literal) -> np.dtype:
    """The dtype of a variable or number; bool if it is not an array."""
    return np.dtype(getattr(v.aval, "dtype", bool))


def follow(jaxpr: Jaxpr, given: Sequence[int], rule: Rule) -> list[int]:
    """Follows labels from the inputs of a program to its results.

    A result has the largest label of the inputs that reach it, and a constant has 0. Branches,
    loops and calls are followed too, a loop until nothing changes. A label may be too large, never
    too small: results of an equation of another kind have the largest label of its inputs.

    Args:
      jaxpr: The program.
      given: A label for each input.
      rule: Rule for some of the equations, also inside the programs of others.

    Returns:
      A label for each result.
    """
    labels = dict(zip(jaxpr.invars, given, strict=True))

    def label_of(v: Var | Literal) -> int:
        return 0 if isinstance(v, Literal) else labels.get(v, 0)

    for eqn in jaxpr.eqns:
        inputs = [*map(label_of, eqn.invars)]
        results = rule(eqn, inputs) or _follow_inside(eqn, inputs, rule)
        labels |= zip(eqn.outvars, results, strict=True)
    return [*map(label_of, jaxpr.outvars)]


def _follow_inside(eqn: JaxprEqn, given: list[int], rule: Rule) -> list[int]:
    params = eqn.params
    match eqn.primitive.name:
        case "cond":
            branches = [follow(branch.jaxpr, given[1:], rule) for branch in params["branches"]]
            return [max(given[0], *labels) for labels in zip(*branches, strict=True)]
        case "scan":
            first, last = carried(eqn)

            def step(carry: list[int]) -> tuple[list[int], None]:
                own = [*given[:first], *carry, *given[last:]]
                return follow(params["jaxpr"].jaxpr, own, rule), None

            return follow_loop(given[first:last], step)[0]
        case "while":
            first = params["cond_nconsts"]
            last = first + params["body_nconsts"]

            def body(carry: list[int]) -> tuple[list[int], None]:
                # The values that decide when the loop ends reach every value that it carries.
                (ends,) = follow(params["cond_jaxpr"].jaxpr, [*given[:first], *carry], rule)
                after = follow(params["body_jaxpr"].jaxpr, [*given[first:last], *carry], rule)
                return [max(ends, label) for label in after], None

            return follow_loop(given[last:], body)[0]
    if inner := called(eqn):
        return follow(inner, given, rule)
    return [max(given, default=0)] * len(eqn.outvars)


def follow_loop(
    carry: list[int], body: Callable[[list[int]], tuple[list[int], _Found]]
) -> tuple[list[int], _Found]:
    """Labels the results of a loop: its carry, after any number of steps, and stacked results.

    Args:
      carry: Labels of the carry before the first step.
      body: Function from the labels of the carry to the labels of a step's results and its finding.

    Returns:
      The labels, and the finding of the last pass.
    """
    while True:
        results, found = body(carry)
        grown = [max(pair) for pair in zip(carry, results, strict=False)]
        if grown == carry:
            return [*carry, *results[len(carry) :]], found
        carry = grown
