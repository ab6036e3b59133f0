"""A traced backward pass: when it finishes each gradient, and a way to run it piece by piece.

The backward pass of any model, once traced, is a list of equations that leads from the cotangent of
the loss to the gradients. The equation that makes a gradient shows when it is finished; no order of
a parameter tree can show it. The list can be evaluated up to there, then a collective be started,
and the rest be evaluated after it.

    _, pullback = jax.vjp(loss, params)
    backward = trace_backward(pullback)
    backward.ready          # number of equations until each leaf is finished

A loop is one equation: gradients that a `lax.scan` over layers stacks up are finished all at once.

A reduction takes gradients bucket by bucket, whether they are finished or still to be made:

    run = grads.start()                            a pass over them, from the beginning
    run.take(leaves)                               gradients; a backward pass runs up to the last
    bucket, flying = run.hold(bucket, flying)      a backward pass waits there for both
    run.rest(done)                                 the other leaves, at the end of the pass

Gradients are immutable: each `start` begins again, so that branches of one program can share them.

XLA's scheduler may postpone an operation without a consumer, and would postpone collectives to the
end. So a backward pass waits at a barrier until a bucket is packed and the one before it has
arrived. The collective between two barriers is overlapped with the pass.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jddp.ground.typing import Grads, PyTree
from jddp.reduce.hooks import GradBucket


@dataclasses.dataclass(frozen=True)
class Backward:
    """A backward pass, from the cotangent of the loss to the gradients.

    Attributes:
      traced: Equations of the pass; calls of jitted functions are inlined.
      treedef: The structure of the gradients.
      ready: Number of equations after which each gradient leaf is finished. None for a leaf that
        is made of constants alone: it is zero on all replicas.
    """

    traced: ClosedJaxpr
    treedef: jax.tree_util.PyTreeDef
    ready: tuple[int | None, ...]


def trace_backward(pullback: Callable[[jax.Array], PyTree]) -> Backward:
    """Traces the pullback of `jax.vjp` for a float32 cotangent, and computes nothing.

    Args:
      pullback: Function from the cotangent of the loss to the tree of gradients.
    """
    one = jnp.float32(1)
    traced, shapes = jax.make_jaxpr(pullback, return_shape=True)(one)
    # A jitted function is one equation: all its gradients would be finished at its end. In a model
    # that is jitted as a whole, no bucket could be sent before the end.
    inlined = opened(traced)
    return Backward(inlined, jax.tree.structure(shapes), _ready(inlined.jaxpr))


def opened(traced: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with the calls of jitted functions inlined."""
    given = [v.aval for v in traced.jaxpr.invars]
    return jax.make_jaxpr(lambda *given: _open(traced.jaxpr, traced.consts, given))(*given)


def _ready(jaxpr: Jaxpr) -> tuple[int | None, ...]:
    # Values of the forward pass count too: a custom rule may compute a gradient from them alone.
    finished = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), 0)
    for num, eqn in enumerate(jaxpr.eqns, start=1):
        if any(var in finished for var in variables(eqn)):
            finished |= dict.fromkeys(eqn.outvars, num)
    # If the loss does not use a parameter, its zero gradient is a literal, or made of literals.
    return tuple(None if isinstance(v, Literal) else finished.get(v) for v in jaxpr.outvars)


def _open(
    jaxpr: Jaxpr, consts: Sequence[jax.typing.ArrayLike], args: Sequence[jax.typing.ArrayLike]
) -> list[jax.typing.ArrayLike]:
    """Evaluates equation by equation, and inlines the calls of jitted functions."""
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    values: dict[Var, jax.typing.ArrayLike] = dict(zip(inputs, (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            values |= zip(eqn.outvars, _open(inner.jaxpr, inner.consts, operands), strict=True)
        else:
            values |= evaluate(jaxpr, [eqn], values)
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def evaluate(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], values: Mapping[Var, jax.typing.ArrayLike]
) -> dict[Var, jax.Array]:
    """Returns the results of some equations of a jaxpr, from the values of earlier variables."""
    made = [var for eqn in eqns for var in eqn.outvars]
    # The order of first use, not the order of a set: the program, its text and its compiled form in
    # the cache must be the same in every process.
    given = [v for v in dict.fromkeys(v for e in eqns for v in variables(e)) if v in values]
    piece = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=list(eqns))
    return dict(
        zip(made, jax.core.eval_jaxpr(piece, (), *map(values.__getitem__, given)), strict=True)
    )


def variables(eqn: JaxprEqn) -> list[Var]:
    """Returns the variables that an equation reads."""
    return [v for v in eqn.invars if not isinstance(v, Literal)]


Held = tuple[GradBucket, list[GradBucket]]


class Finished:
    """Gradients that are finished: a pass over them has nothing to run."""

    def __init__(self, tree: Grads) -> None:
        self._leaves, self.treedef = jax.tree.flatten(tree)

    def start(self) -> "Finished":
        """A pass over the gradients, which has no state."""
        return self

    def tree(self) -> Grads:
        """The gradients as they are."""
        return jax.tree.unflatten(self.treedef, self._leaves)

    def take(self, leaves: Sequence[int]) -> list[jax.Array]:
        """The gradients at these positions."""
        return [self._leaves[i] for i in leaves]

    def hold(self, bucket: GradBucket, flying: list[GradBucket]) -> Held:
        """Returns both as they are: nothing waits for them."""
        return bucket, flying

    def rest(self, done: Container[int]) -> dict[int, jax.Array]:
        """The gradients at other positions than `done`."""
        return {i: x for i, x in enumerate(self._leaves) if i not in done}


class Running:
    """Gradients that a traced backward pass makes: it has run up to some equation.

    Args:
      backward: The traced backward pass, from the cotangent 1.
      finish: Function of a leaf's position and value that returns the leaf to send. It is
        called for one leaf at a time, so that no bucket waits for leaves of another.
    """

    def __init__(self, backward: Backward, finish: Callable[[int, jax.Array], jax.Array]) -> None:
        self.backward, self.finish = backward, finish
        self.treedef, traced = backward.treedef, backward.traced
        inputs = (*traced.jaxpr.constvars, *traced.jaxpr.invars)
        self._jaxpr = traced.jaxpr
        self._num_done = 0
        self._moved = False
        # The pass starts from 1. The loss scale is multiplied in where the pass is traced: it may
        # be traced itself, and differ from step to step.
        self._values = dict(zip(inputs, (*traced.consts, jnp.float32(1)), strict=True))
        self._made: set[Var] = set()

    def start(self) -> "Running":
        """The pass, with nothing computed yet."""
        return Running(self.backward, self.finish)

    def tree(self) -> PyTree:
        """All results of the pass."""
        return jax.tree.unflatten(self.treedef, self.start().take(range(self.treedef.num_leaves)))

    def take(self, leaves: Sequence[int]) -> list[jax.Array]:
        """Runs up to the last of these gradients; to the end, if it never reaches one of them."""
        ready = [self.backward.ready[i] for i in leaves]
        self._run(max((len(self._jaxpr.eqns) if end is None else end for end in ready), default=0))
        return [*map(self.finish, leaves, self._outputs(leaves))]

    def hold(self, bucket: GradBucket, flying: list[GradBucket]) -> Held:
        """Lets the rest of the pass begin once the bucket is packed and earlier ones arrived."""
        # At most one bucket is in flight. Its result enters the next barrier, so XLA must start the
        # collective before. The equations between the two barriers hide it.
        # Two buckets that are complete at the same equation need only one barrier in the pass.
        crossing = self._crossing() if self._moved else {}
        bucket, values, flying = lax.optimization_barrier((bucket, [*crossing.values()], flying))
        self._values.update(zip(crossing, values, strict=True))
        return bucket, flying

    def rest(self, done: Container[int]) -> dict[int, jax.Array]:
        """Runs to the end, and returns the leaves at other positions than `done`.

        Gradients of unused parameters are among them, as the pass makes them: zero.
        """
        self._run(len(self._jaxpr.eqns))
        left = [i for i in range(self.treedef.num_leaves) if i not in done]
        return dict(zip(left, self._outputs(left), strict=True))

    def _run(self, end: int) -> None:
        eqns = self._jaxpr.eqns[self._num_done : end]
        self._moved = bool(eqns)
        self._num_done += len(eqns)
        self._values |= evaluate(self._jaxpr, eqns, self._values)
        self._made |= {var for eqn in eqns for var in eqn.outvars}

    def _outputs(self, leaves: Sequence[int]) -> list[jax.Array]:
        outvars = (self._jaxpr.outvars[i] for i in leaves)
        return [v.val if isinstance(v, Literal) else self._values[v] for v in outvars]

    def _crossing(self) -> dict[Var, jax.Array]:
        """Values that this pass has made so far and still needs: the frontier of its dataflow."""
        # Residuals of the forward pass do not cross. They were there before, and a barrier on them
        # would only keep XLA from fusing their use.
        needed = (v for eqn in self._jaxpr.eqns[self._num_done :] for v in variables(eqn))
        return {var: self._values[var] for var in needed if var in self._made}


Gradients = Finished | Running
