"""Compare what replicas have to have alike, bit by bit, while the run goes on."""

from typing import Any

import jax

from jddp.engine.digest import digests, find_divergence
from jddp.engine.state import TrainState
from jddp.errors import ReplicaMismatchError


class Comparison:
    """Of all replicas of a state: begun on the devices, read one step later.

    Args:
      every: Steps between comparisons; None never compares.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._begun: tuple[int, Any, Any] | None = None

    def begin(self, step: int, state: TrainState) -> None:
        """Digests a state after `step` finished steps, where that is due; waits for nothing."""
        is_alone = state.step.sharding.mesh.size == 1
        is_taken = state.step.is_deleted()  # the next step refuses it, in words
        if self._every is None or is_alone or is_taken or step % self._every:
            return
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        self._begun = step, digests(state), shapes

    def finish(self) -> None:
        """Waits for what was begun.

        Raises:
          ReplicaMismatchError: If replicas differ.
        """
        if self._begun is None:
            return
        step, found, shapes = self._begun
        self._begun = None
        if (told := find_divergence(found, shapes)) is not None:
            raise ReplicaMismatchError(
                f"After step {step} {told}. No checkpoint is made of that: those that are there "
                "are of replicas that were alike. Leave that device out, or look for code that "
                "depends on the host."
            )
