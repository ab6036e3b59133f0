"""A traced backward pass: when it finishes each gradient, and a way to run it piece by piece.

The backward pass of any model, once traced, is a list of equations that leads from the cotangent of
the loss to the gradients. The equation that makes a gradient shows when it is finished, which no
order of a parameter tree can; and the list can be evaluated up to there, then a collective be
started, and the rest be evaluated after it.

    _, pullback = jax.vjp(loss, params)
    backward = trace_backward(pullback)
    backward.ready          # for each leaf: the number of equations that it takes

A loop is one equation: gradients that a `lax.scan` over layers stacks up are finished all at once.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jddp.typing import Leaf, PyTree


@dataclasses.dataclass(frozen=True)
class Backward:
    """A backward pass, from the cotangent of the loss to the gradients.

    Attributes:
      traced: Equations of the pass; calls of jitted functions are inlined.
      treedef: The structure of the gradients.
      ready: Number of equations after which each gradient leaf is finished; None for a leaf that
        is made of constants alone: zero, the same on all replicas.
      num_looped: Number of gradients that are results of a loop.
    """

    traced: ClosedJaxpr
    treedef: jax.tree_util.PyTreeDef
    ready: tuple[int | None, ...]
    num_looped: int


def trace_backward(pullback: Callable[[jax.Array], PyTree]) -> Backward:
    """Traces the pullback of `jax.vjp` for a float32 cotangent, with nothing computed.

    Args:
      pullback: Function from the cotangent of the loss to the tree of gradients.
    """
    one = jnp.float32(1)
    traced, shapes = jax.make_jaxpr(pullback, return_shape=True)(one)
    # A jitted function is one equation, at whose end all its gradients would be finished at once.
    # In a model that is jitted as a whole, no bucket could be sent before the last.
    opened = jax.make_jaxpr(lambda one: _open(traced.jaxpr, traced.consts, [one]))(one)
    # A scan over layers stacks their gradients, so no gradient in it is finished before its end.
    # The plan reports their number, for then there is less to overlap.
    loops = [eqn for eqn in opened.eqns if eqn.primitive.name in ("scan", "while")]
    gradients = [v for v in opened.jaxpr.outvars if isinstance(v, Var)]
    num_looped = len({v for eqn in loops for v in eqn.outvars}.intersection(gradients))
    return Backward(opened, jax.tree.structure(shapes), _ready(opened.jaxpr), num_looped)


def _ready(jaxpr: Jaxpr) -> tuple[int | None, ...]:
    # Also from values of the forward pass, of which alone a custom rule may make a gradient.
    finished = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), 0)
    for num, eqn in enumerate(jaxpr.eqns, start=1):
        if any(var in finished for var in variables(eqn)):
            finished |= dict.fromkeys(eqn.outvars, num)
    # The zero gradient of a parameter that the loss does not use is a literal, or made of literals.
    return tuple(None if isinstance(v, Literal) else finished.get(v) for v in jaxpr.outvars)


def _open(jaxpr: Jaxpr, consts: Sequence[Leaf], args: Sequence[Leaf]) -> list[Leaf]:
    """Evaluates equation by equation; a jitted function in the place of its call."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            inputs = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            values |= zip(eqn.outvars, _open(inner.jaxpr, inner.consts, inputs), strict=True)
        else:
            values |= evaluate(jaxpr, [eqn], values)
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def evaluate(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], values: dict[Var, Leaf]) -> dict[Var, Leaf]:
    """Returns the results of some equations of a jaxpr, from the values of earlier variables."""
    made = [var for eqn in eqns for var in eqn.outvars]
    # In the order of first use, not of a set: the program, and so its text and its compiled form in
    # the cache, must be the same in every process.
    given = [v for v in dict.fromkeys(v for e in eqns for v in variables(e)) if v in values]
    piece = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=list(eqns))
    return dict(zip(made, eval_jaxpr(piece, (), *map(values.__getitem__, given)), strict=True))


def variables(eqn: JaxprEqn) -> list[Var]:
    """Returns the variables that an equation reads."""
    return [v for v in eqn.invars if not isinstance(v, Literal)]
