"""The source from which a replica's model gets its parameters.

    WholeParameters      each replica has all parameters
    DividedParameters    each replica has a part, and gathers the rest where it is used

A model is run and differentiated by the source of its parameters, and knows nothing of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import jax
from jax import lax

from jddp.reduce.lazy import CONSTANT, PARAMETERS, Lazy, Part, forget
from jddp.typing import Params, PyTree

Dims = tuple[int | None, ...]  # along which each leaf is divided
Loss = Callable[[Params], tuple[jax.Array, PyTree]]
Pullback = Callable[[jax.Array], tuple[Params]]


@runtime_checkable
class ParameterSource(Protocol):
    """The source from which a replica's model gets its parameters."""

    @property
    def dims(self) -> Dims:
        """Dims along which parameters are divided, leaf by leaf; () where all are whole."""

    def run(self, function: Callable[[Params], PyTree], params: Params) -> PyTree:
        """Returns `function` of the whole parameters.

        Args:
          function: Function of whole parameters.
          params: This replica's parameters, or its parts of them.
        """

    def linearize(self, loss: Loss, params: Params) -> tuple[jax.Array, Pullback, PyTree]:
        """Returns the loss, its pullback and its auxiliary values, as `jax.vjp` does.

        The pullback returns this replica's gradients of whole parameters, and its part of the mean
        of all replicas' gradients of the others.
        """


@final
@dataclass(frozen=True)
class WholeParameters:
    """Each replica has all parameters."""

    dims = ()

    def run(self, function: Callable[[Params], PyTree], params: Params) -> PyTree:
        """Calls the function."""
        return function(params)

    def linearize(self, loss: Loss, params: Params) -> tuple[jax.Array, Pullback, PyTree]:
        """Differentiates by `jax.vjp`."""
        found: tuple[jax.Array, Pullback, PyTree] = jax.vjp(loss, params, has_aux=True)
        return found


WHOLE = WholeParameters()


@final
@dataclass(frozen=True)
class DividedParameters:
    """Each replica has a part of the parameters.

    Attributes:
      dims: Dims along which parameters are divided, leaf by leaf; None for one that is whole.
      num: Number of replicas.
      lazy: Evaluation that gathers parameters where they are used.
    """

    dims: Dims
    num: int
    lazy: Lazy

    def run(self, function: Callable[[Params], PyTree], params: Params) -> PyTree:
        """Traces the function for whole parameters, and gathers them as it evaluates the trace."""
        leaves, treedef = jax.tree.flatten(params)
        parts = [*map(self._part, leaves, self.dims)]
        both = zip(parts, leaves, strict=True)
        shapes = [jax.ShapeDtypeStruct(x.shape, leaf.dtype) for x, leaf in both]
        traced, results = jax.make_jaxpr(function, return_shape=True)(
            jax.tree.unflatten(treedef, shapes)
        )
        made = [PARAMETERS if isinstance(x, Part) else CONSTANT for x in parts]
        return jax.tree.unflatten(
            jax.tree.structure(results), self.lazy.evaluate(traced, parts, made)
        )

    def linearize(self, loss: Loss, params: Params) -> tuple[jax.Array, Pullback, PyTree]:
        """Differentiates; the backward pass gathers parameters again, unless they are kept."""
        run: Loss = functools.partial(self.run, loss)
        if self.lazy.keeps:
            return WHOLE.linearize(run, params)
        # CSE may merge what a model computes twice, as it may without the call: parameters are
        # kept apart below.
        run = jax.checkpoint(run, policy=forget, prevent_cse=False)
        value, pullback, aux = jax.vjp(run, params, has_aux=True)
        return value, _after(pullback, params, value), aux

    def _part(self, x: jax.Array, dim: int | None) -> jax.Array | Part:
        if dim is None:
            return x
        shape = (*x.shape[:dim], x.shape[dim] * self.num, *x.shape[dim + 1 :])
        return Part(x, dim, shape)


def _after(pullback: PyTree, params: Params, value: jax.Array) -> PyTree:
    """The pullback, whose parameters are there only after the forward pass."""
    # XLA would see that the backward pass gathers what the forward pass has gathered, and keep it.
    mine = {id(x) for x in jax.tree.leaves(params)}
    leaves, treedef = jax.tree.flatten(pullback)
    places = [i for i, x in enumerate(leaves) if id(x) in mine]
    later, _ = lax.optimization_barrier(([leaves[i] for i in places], value))
    for i, x in zip(places, later, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)
