"""The source from which a replica's model gets its parameters.

With `WholeParameters` each replica has all of them; `jddp.engine.placement` has the source of those
that are divided. A model is run and differentiated by the source of its parameters, and knows
nothing of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import jax

from jddp.reduce.shards import Groups
from jddp.typing import Grads, Params, PyTree

Dims = tuple[int | None, ...]  # along which each leaf is divided
Loss = Callable[[Params], tuple[jax.Array, PyTree]]
Pullback = Callable[[jax.Array], tuple[Params]]


@runtime_checkable
class ParameterSource(Protocol):
    """The source from which a replica's model gets its parameters."""

    @property
    def dims(self) -> Dims:
        """Dims along which parameters are divided, leaf by leaf; () where all are whole."""

    @property
    def groups(self) -> Groups | None:
        """Groups of replicas that divide parameters; None where all are whole."""

    def run(self, function: Callable[[Params], PyTree], params: Params) -> PyTree:
        """Returns `function` of the whole parameters.

        Args:
          function: Function of whole parameters.
          params: This replica's parameters, or its parts of them.
        """

    def linearize(self, loss: Loss, params: Params) -> tuple[jax.Array, Pullback, PyTree]:
        """Returns the loss, its pullback and its auxiliary values, as `jax.vjp` does.

        The pullback returns this replica's gradients of whole parameters, and of the others its
        part of the mean gradient of its group of replicas.
        """

    def mean_of_groups(self, grads: Grads) -> Grads:
        """Returns gradients of which those of divided parameters are averaged over all groups."""


@final
@dataclass(frozen=True)
class WholeParameters:
    """Each replica has all parameters."""

    dims = ()
    groups = None

    def run(self, function: Callable[[Params], PyTree], params: Params) -> PyTree:
        """Calls the function."""
        return function(params)

    def linearize(self, loss: Loss, params: Params) -> tuple[jax.Array, Pullback, PyTree]:
        """Differentiates by `jax.vjp`."""
        found: tuple[jax.Array, Pullback, PyTree] = jax.vjp(loss, params, has_aux=True)
        return found

    def mean_of_groups(self, grads: Grads) -> Grads:
        """Returns the gradients as they are."""
        return grads


WHOLE = WholeParameters()
