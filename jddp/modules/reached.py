"""Results and random keys of a program that depend on its inputs.

A random key that no input reaches is made from constants, as in `jax.random.key(0)` inside a loss,
or is closed over: its numbers are the same in every step and on every replica. In the programs
inside of an unknown equation no keys are looked for.
"""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from jddp.jaxprs import DRAWING, Followed, follow

# The first input of each of these is the key, or the first half of one.
_KEYED = DRAWING - {"rng_uniform"}


def reached_by(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Returns which results of a program depend on the inputs that are true in `given`."""
    return [bool(label) for label in follow(jaxpr, given, _find_constant_key)[0]]


def uses_constant_key(jaxpr: Jaxpr) -> bool:
    """Whether any random number of a program has a key that none of its inputs reaches."""
    return follow(jaxpr, [True] * len(jaxpr.invars), _find_constant_key)[1]


def _find_constant_key(eqn: JaxprEqn, given: list[int]) -> Followed | None:
    if eqn.primitive.name not in _KEYED:
        return None
    return [max(given)] * len(eqn.outvars), not given[0]
