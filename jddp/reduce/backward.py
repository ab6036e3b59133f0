"""A traced backward pass: when it finishes each gradient, and a way to run it piece by piece.

The backward pass of any model, once traced, is a list of equations that leads from the cotangent of
the loss to the gradients. The equation that makes a gradient shows when it is finished, which no
order of a parameter tree can; and the list can be evaluated up to there, then a collective be
started, and the rest be evaluated after it.

    _, pullback = jax.vjp(loss, params)
    backward = trace_backward(pullback)
    backward.ready          # for each leaf: the number of equations that it takes

A loop is one equation: gradients that a `lax.scan` over layers stacks up are finished all at once.

The backward pass of a synchronized batch norm adds up sums over all replicas, and the layers before
it wait for them. The weight gradient of the layer behind it does not, and nothing in the pass waits
for that. XLA's scheduler is free to compute it much later, and the all-reduce is exposed. With
`defer_weight_gradients` the pass waits for both:

    input gradient of layer 2 ─► sums ─► all-reduce ─► batch norm ─► input gradient of layer 1
                           └───► weight gradient of layer 2 ─────────────┘

What waits, at a barrier, is the weight of layer 1. At a barrier on the sums, or on what is made of
them, XLA would fuse other operations than without it: in ResNet-50 that costs more than it hides.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jddp.jaxprs import COLLECTIVES, PRODUCTS
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


def defer_weight_gradients(backward: Backward) -> Backward:
    """Returns the pass with a weight gradient beside each collective that does not need it.

    Only products and convolutions are deferred, with what is made of them; the rest takes little
    time. The numbers are the same. A pass without a collective is returned as it is.
    """
    jaxpr, consts = backward.traced.jaxpr, backward.traced.consts
    if not any(map(_is_collective, jaxpr.eqns)):
        return backward

    def run(one: Leaf) -> list[Leaf]:
        given = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, one), strict=True)
        values = _Order(jaxpr, dict(given)).run()
        return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    traced = jax.make_jaxpr(run)(jnp.float32(1))
    return dataclasses.replace(backward, traced=traced, ready=_ready(traced.jaxpr))


class _Order:
    """A pass that is run in the new order.

    Args:
      jaxpr: Equations of the pass.
      values: Values of its constants and inputs.
    """

    def __init__(self, jaxpr: Jaxpr, values: dict[Var, Leaf]) -> None:
        self._jaxpr, self._values = jaxpr, values
        self._needed = _needed_by_collectives(jaxpr)
        self._made_by = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._of_pass = _followers(jaxpr.eqns, {*jaxpr.invars})
        # A weight gradient's product and what is made of it. Of the first nothing has been run yet;
        # the product of the second has, beside a collective.
        self._deferred: list[JaxprEqn] = []
        self._beside: list[JaxprEqn] = []

    def run(self) -> dict[Var, Leaf]:
        """Values of all variables."""
        eqns = self._jaxpr.eqns
        places = [i for i, eqn in enumerate(eqns) if _is_product(eqn) and self._is_needed(eqn)]
        end = max(places, default=-1) + 1  # From there on, nothing would wait for what is deferred.
        weight_grads = [x for x in eqns[:end] if _is_product(x) and not self._is_needed(x)]
        deferrable = _followers(eqns[:end], {v for x in weight_grads for v in x.outvars})
        for eqn in eqns[:end]:
            if not deferrable.isdisjoint(eqn.outvars):
                self._defer(eqn)
            elif _is_collective(eqn):
                self._evaluate(eqn)
                self._run_beside()
            else:
                self._wait_before(eqn)
                self._evaluate(eqn)
        self._evaluate(*self._beside[1:], *self._deferred, *eqns[end:])
        return self._values

    def _defer(self, eqn: JaxprEqn) -> None:
        if _is_product(eqn) and self._deferred:
            # One hides a collective. More would keep their inputs in memory, and a bucket waiting.
            self._evaluate(*self._beside[1:], *self._deferred)
            self._beside, self._deferred = [], []
        self._deferred.append(eqn)

    def _run_beside(self) -> None:
        if self._deferred:
            self._evaluate(*self._beside[1:], self._deferred[0])
            self._beside, self._deferred = self._deferred, []

    def _wait_before(self, eqn: JaxprEqn) -> None:
        """Lets a product begin only when the deferred one is finished."""
        if not (self._beside and _is_product(eqn)):
            return
        weights, made = self._weights(eqn)
        if not weights:
            return
        # Of the product itself, since XLA fuses what is made of it with the packing of a bucket.
        held = [*weights, *self._beside[0].outvars]
        values = lax.optimization_barrier([self._values[v] for v in held])
        self._values |= zip(held, values, strict=True)
        # Last, or a bucket that leaves here would hold the factor too.
        self._evaluate(*self._beside[1:], *made)
        self._beside = []

    def _weights(self, product: JaxprEqn) -> tuple[list[Var], list[JaxprEqn]]:
        """Constants of the pass in a product, and equations that make its factor of them."""
        # The constant itself waits: XLA knows the product by these equations, such as a reversal.
        waiting = [v for v in variables(product) if v not in self._of_pass]
        weights, places = list[Var](), set[int]()
        while waiting:
            v = waiting.pop()
            if v in self._made_by:
                places.add(self._made_by[v])
                waiting += variables(self._jaxpr.eqns[self._made_by[v]])
            else:
                weights.append(v)
        return [*dict.fromkeys(weights)], [self._jaxpr.eqns[i] for i in sorted(places)]

    def _is_needed(self, eqn: JaxprEqn) -> bool:
        return not self._needed.isdisjoint(eqn.outvars)

    def _evaluate(self, *eqns: JaxprEqn) -> None:
        self._values |= evaluate(self._jaxpr, eqns, self._values)


def _needed_by_collectives(jaxpr: Jaxpr) -> set[Var]:
    """Variables of which a collective is made, and its results."""
    needed = set[Var]()
    for eqn in reversed(jaxpr.eqns):
        if _is_collective(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn), eqn.outvars)
    return needed


def _followers(eqns: list[JaxprEqn], of: set[Var]) -> set[Var]:
    """These variables, and all that equations make of them."""
    found = {*of}
    for eqn in eqns:
        if not found.isdisjoint(variables(eqn)):
            found.update(eqn.outvars)
    return found


def _is_collective(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in COLLECTIVES


def _is_product(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in PRODUCTS
