"""Which results of a traced function differ from replica to replica.

A value varies if rows, or a random key, of one replica reach it through the equations, or the
number of the replica does. A collective over all replicas, such as `lax.psum`, makes what it
returns equal again. So the program shows which state of a model depends on the rows of a
replica, whatever layer wrote it.

The analysis is cautious: results of an unknown equation vary if one of its inputs does, and a loop
is followed until nothing changes. An equal value may be taken for varying; never the reverse.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jddp.jaxprs import axes_of, called, carried
from jddp.typing import PyTree

EQUAL, GROUPED, VARYING = range(3)
# Collectives whose results are equal on all replicas.
EQUALISING = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def find_varying(
    run: Callable[..., PyTree], given: Sequence[PyTree], labels: Sequence[PyTree], axis: str
) -> tuple[Callable[[], PyTree], PyTree]:
    """Finds which results of a function of arrays vary.

    Args:
      run: Function of trees of arrays that returns a tree of arrays; traced once.
      given: Arguments of the function.
      labels: EQUAL or VARYING, for each leaf of `given`.
      axis: Name of the mapped axis.

    Returns:
      A function that evaluates the traced program for `given`; and a label for each result, GROUPED
      for one that is equal within groups of replicas.
    """
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(*given)
    like_results = functools.partial(jax.tree.unflatten, jax.tree.structure(shapes))

    def evaluate() -> PyTree:
        leaves = jax.tree.leaves(tuple(given))
        return like_results(eval_jaxpr(traced.jaxpr, traced.consts, *leaves))

    return evaluate, like_results(_follow(traced.jaxpr, jax.tree.leaves(tuple(labels)), axis))


def _follow(jaxpr: Jaxpr, given: Sequence[int], axis: str) -> list[int]:
    known = dict(zip(jaxpr.invars, given, strict=True))

    def label(v: Any) -> int:
        return EQUAL if isinstance(v, Literal) else known.get(v, EQUAL)  # of a constant

    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _results(eqn, [*map(label, eqn.invars)], axis), strict=True)
    return [*map(label, jaxpr.outvars)]


def _results(eqn: JaxprEqn, given: list[int], axis: str) -> list[int]:
    name = eqn.primitive.name
    params = eqn.params
    num = len(eqn.outvars)
    follow = functools.partial(_follow, axis=axis)
    if axis in axes_of(eqn):
        if name not in EQUALISING:
            return [VARYING] * num
        return [EQUAL if params.get("axis_index_groups") is None else GROUPED] * num
    if name == "cond":
        branches = (follow(branch.jaxpr, given[1:]) for branch in params["branches"])
        return [max(given[0], *labels) for labels in zip(*branches, strict=True)]
    if name == "scan":
        first, last = carried(eqn)

        def body(carry: list[int]) -> list[int]:
            return follow(params["jaxpr"].jaxpr, [*given[:first], *carry, *given[last:]])

        return _loop(given[first:last], body)
    if name == "while":
        first = params["cond_nconsts"]
        last = params["cond_nconsts"] + params["body_nconsts"]

        def pass_on(carry: list[int]) -> list[int]:
            # Replicas that leave the loop at other times carry other values.
            (leaves,) = follow(params["cond_jaxpr"].jaxpr, [*given[:first], *carry])
            after = follow(params["body_jaxpr"].jaxpr, [*given[first:last], *carry])
            return [max(leaves, label) for label in after]

        return _loop(given[last:], pass_on)
    if inner := called(eqn):
        return follow(inner, given)
    return [max(given, default=EQUAL)] * num


def _loop(carry: list[int], body: Callable[[list[int]], list[int]]) -> list[int]:
    """Labels of the results of a loop: its carry, after any number of steps, and stacked ones."""
    while (results := body(carry)) and any(b > a for a, b in zip(carry, results, strict=False)):
        carry = [max(pair) for pair in zip(carry, results, strict=False)]
    return [*carry, *results[len(carry) :]]
