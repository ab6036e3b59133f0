"""The gradients that a reduction is given: finished, or still to be made by a backward pass.

A reduction asks both the same, bucket by bucket:

    run = grads.start()                            a pass over them, from the beginning
    run.take(leaves)                               gradients; a backward pass runs up to the last
    bucket, flying = run.hold(bucket, flying)      a backward pass waits there for both
    run.rest(done)                                 the other leaves, at the end of the pass

Gradients are immutable: each `start` begins again, so that branches of one program can share them.

XLA's scheduler may postpone an operation without a consumer, and would postpone collectives to the
end. So a backward pass waits at a barrier until a bucket is packed and the one before it has
arrived. The collective between two barriers is overlapped with the pass.
"""

from collections.abc import Callable, Container, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Var

from jddp.reduce.backward import Backward, evaluate, variables
from jddp.reduce.hooks import GradBucket
from jddp.typing import Grads, Leaf, PyTree

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

    def take(self, leaves: Sequence[int]) -> list[Leaf]:
        """The gradients at these positions."""
        return [self._leaves[i] for i in leaves]

    def hold(self, bucket: GradBucket, flying: list[GradBucket]) -> Held:
        """Both as they are: nothing waits for them."""
        return bucket, flying

    def rest(self, done: Container[int]) -> dict[int, Leaf]:
        """The gradients at other positions than `done`."""
        return {i: x for i, x in enumerate(self._leaves) if i not in done}


class Running:
    """Gradients that a traced backward pass makes, which runs where they are taken.

    Args:
      backward: The traced backward pass.
      finish: Function of a leaf's position and value that returns the leaf to send. It is
        called for one leaf at a time, so that no bucket waits for leaves of another.
    """

    def __init__(self, backward: Backward, finish: Callable[[int, Leaf], Leaf]) -> None:
        self.backward, self.finish = backward, finish
        self.treedef = backward.treedef

    def start(self) -> "Pass":
        """The pass, with nothing computed yet."""
        return Pass(self)

    def tree(self) -> PyTree:
        """All results of the pass."""
        return jax.tree.unflatten(self.treedef, self.start().take(range(self.treedef.num_leaves)))


class Pass:
    """A backward pass that has run up to some equation, from the cotangent 1."""

    def __init__(self, grads: Running) -> None:
        traced = grads.backward.traced
        inputs = (*traced.jaxpr.constvars, *traced.jaxpr.invars)
        self._grads = grads
        self._jaxpr = traced.jaxpr
        self._num_done = 0
        self._moved = False
        # From 1, since the loss scale is multiplied in where the pass is traced: it may be traced
        # itself, and differ from step to step.
        self._values = dict(zip(inputs, (*traced.consts, jnp.float32(1)), strict=True))
        self._made: set[Var] = set()

    def take(self, leaves: Sequence[int]) -> list[Leaf]:
        """Runs up to the last of these gradients; to the end, if it never reaches one of them."""
        ready = [self._grads.backward.ready[i] for i in leaves]
        self._run(max((len(self._jaxpr.eqns) if end is None else end for end in ready), default=0))
        return [*map(self._grads.finish, leaves, self._outputs(leaves))]

    def hold(self, bucket: GradBucket, flying: list[GradBucket]) -> Held:
        """Lets the rest of the pass begin once the bucket is packed and those before arrived."""
        # At most one bucket is in flight. Its result enters the next barrier, so XLA must start the
        # collective before; the equations between the two barriers are what hides it.
        # Two buckets that are complete at the same equation need only one barrier in the pass.
        crossing = self._crossing() if self._moved else {}
        bucket, values, flying = lax.optimization_barrier((bucket, [*crossing.values()], flying))
        self._values.update(zip(crossing, values, strict=True))
        return bucket, flying

    def rest(self, done: Container[int]) -> dict[int, Leaf]:
        """Runs to the end; the leaves at other positions than `done`.

        Gradients among them, of unused parameters, are as the pass makes them: zero.
        """
        self._run(len(self._jaxpr.eqns))
        left = [i for i in range(self._grads.treedef.num_leaves) if i not in done]
        return dict(zip(left, self._outputs(left), strict=True))

    def _run(self, end: int) -> None:
        eqns = self._jaxpr.eqns[self._num_done : end]
        self._moved = bool(eqns)
        self._num_done += len(eqns)
        self._values |= evaluate(self._jaxpr, eqns, self._values)
        self._made |= {var for eqn in eqns for var in eqn.outvars}

    def _outputs(self, leaves: Sequence[int]) -> list[Leaf]:
        outvars = (self._jaxpr.outvars[i] for i in leaves)
        return [v.val if isinstance(v, Literal) else self._values[v] for v in outvars]

    def _crossing(self) -> dict[Var, Leaf]:
        """Values that this pass has made so far and still needs: the frontier of its dataflow."""
        # Residuals of the forward pass do not cross: they were there before, so a barrier on them
        # would only keep XLA from fusing their use.
        needed = (v for eqn in self._jaxpr.eqns[self._num_done :] for v in variables(eqn))
        return {var: self._values[var] for var in needed if var in self._made}


Gradients = Finished | Running
