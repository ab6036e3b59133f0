"""Whether a program uses random numbers of keys that nothing given to it reaches.

Such a key is made from constants, as in `jax.random.key(0)` inside a loss, or is closed over: the
numbers are the same in every step and on every replica. The equations are followed from the inputs
of the program to the keys of its random numbers.

The analysis reports what it can follow. In a program inside an equation of an unknown kind, nothing
is looked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jddp.jaxprs import DRAWING, called

# The first input of each of these is the key, or the first half of one.
_KEYED = DRAWING - {"rng_uniform"}

Followed = tuple[list[bool], bool]  # which results are reached; whether a constant key is used


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
    name, params = eqn.primitive.name, eqn.params
    if name in _KEYED:
        return [any(given)] * len(eqn.outvars), not given[0]
    if name == "cond":
        branches = [_follow(branch.jaxpr, given[1:]) for branch in params["branches"]]
        labels = [given[0] or any(each) for each in zip(*(x for x, _ in branches), strict=True)]
        return labels, any(finds for _, finds in branches)
    if name == "scan":
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]

        def body(carry: list[bool]) -> Followed:
            return _follow(params["jaxpr"].jaxpr, [*given[:first], *carry, *given[last:]])

        return _loop(given[first:last], body)
    if name == "while":
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        loop = params["body_jaxpr"].jaxpr
        return _loop(given[last:], lambda carry: _follow(loop, [*given[first:last], *carry]))
    if inner := called(eqn):
        return _follow(inner, given)
    return [any(given)] * len(eqn.outvars), False


def _loop(carry: list[bool], body: Callable[[list[bool]], Followed]) -> Followed:
    """What a loop makes of its carry: followed until nothing changes, and only then looked at."""
    while (results := body(carry)) and any(b > a for a, b in zip(carry, results[0], strict=False)):
        carry = [a or b for a, b in zip(carry, results[0], strict=False)]
    return [*carry, *results[0][len(carry) :]], results[1]
