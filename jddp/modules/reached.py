"""What the inputs of a program reach: results, and keys of random numbers.

A random key that no input reaches is made from constants, as in `jax.random.key(0)` inside a loss,
or is closed over: its numbers are the same in every step and on every replica.

The analysis is cautious about results: those of an unknown equation are reached if one of its
inputs is. In the programs inside of an unknown equation no keys are looked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jddp.jaxprs import DRAWING, called, carried

# The first input of each of these is the key, or the first half of one.
_KEYED = DRAWING - {"rng_uniform"}

Followed = tuple[list[bool], bool]  # which results are reached; whether a constant key is used


def reached_by(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Which results of a program those of its inputs reach that are true in `given`."""
    return _follow(jaxpr, given)[0]


def uses_constant_key(jaxpr: Jaxpr) -> bool:
    """Whether any random number of a program has a key that none of its inputs reaches."""
    return _follow(jaxpr, [True] * len(jaxpr.invars))[1]


def _follow(jaxpr: Jaxpr, given: Sequence[bool]) -> Followed:
    reached = dict(zip(jaxpr.invars, given, strict=True))
    found = False

    def is_reached(v: Any) -> bool:
        return not isinstance(v, Literal) and reached.get(v, False)  # False: of a constant

    for eqn in jaxpr.eqns:
        results, finds = _results(eqn, [*map(is_reached, eqn.invars)])
        found = found or finds
        reached |= zip(eqn.outvars, results, strict=True)
    return [*map(is_reached, jaxpr.outvars)], found


def _results(eqn: JaxprEqn, given: list[bool]) -> Followed:
    name = eqn.primitive.name
    params = eqn.params
    if name in _KEYED:
        return [any(given)] * len(eqn.outvars), not given[0]
    if name == "cond":
        branches = [_follow(branch.jaxpr, given[1:]) for branch in params["branches"]]
        results = zip(*(results for results, _ in branches), strict=True)
        return [given[0] or any(each) for each in results], any(finds for _, finds in branches)
    if name == "scan":
        first, last = carried(eqn)

        def body(carry: list[bool]) -> Followed:
            return _follow(params["jaxpr"].jaxpr, [*given[:first], *carry, *given[last:]])

        return _loop(given[first:last], body)
    if name == "while":
        first = params["cond_nconsts"]
        last = params["cond_nconsts"] + params["body_nconsts"]

        def pass_on(carry: list[bool]) -> Followed:
            # What decides about the end of the loop reaches all that it carries.
            (ends,), _ = _follow(params["cond_jaxpr"].jaxpr, [*given[:first], *carry])
            after, finds = _follow(params["body_jaxpr"].jaxpr, [*given[first:last], *carry])
            return [ends or x for x in after], finds

        return _loop(given[last:], pass_on)
    if inner := called(eqn):
        return _follow(inner, given)
    return [any(given)] * len(eqn.outvars), False


def _loop(carry: list[bool], body: Callable[[list[bool]], Followed]) -> Followed:
    """Follows a loop until nothing changes; keys are judged by the last pass alone."""
    while (results := body(carry)) and any(b > a for a, b in zip(carry, results[0], strict=False)):
        carry = [a or b for a, b in zip(carry, results[0], strict=False)]
    return [*carry, *results[0][len(carry) :]], results[1]
