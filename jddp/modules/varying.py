"""Which results of a traced function differ from replica to replica.

A value varies if rows, or a random key, of one replica reach it through the equations, or the
number of the replica does. A collective over all replicas, such as `lax.psum`, makes what it
returns equal again. So the program shows which state of a model depends on the rows of a
replica, whatever layer wrote it.

An equal value may be taken for varying; never the reverse.
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax.core import eval_jaxpr
from jax.extend.core import JaxprEqn

from jddp.jaxprs import Followed, axes_of, follow
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

    equalize = functools.partial(_equalize, axis=axis)
    found, _ = follow(traced.jaxpr, jax.tree.leaves(tuple(labels)), equalize)
    return evaluate, like_results(found)


def _equalize(eqn: JaxprEqn, given: list[int], axis: str) -> Followed | None:
    if axis not in axes_of(eqn):
        return None
    label = VARYING
    if eqn.primitive.name in EQUALISING:
        label = EQUAL if eqn.params.get("axis_index_groups") is None else GROUPED
    return [label] * len(eqn.outvars), False
