"""The bitwise comparison of all replicas during training."""

import jax

from jddp.engine.digest import digests, find_divergence
from jddp.engine.state import TrainState
from jddp.errors import ReplicaMismatchError


class ReplicaCheck:
    """A comparison of all replicas of a state: started on the devices, read one step later.

    Args:
      every: Steps between comparisons; None never compares.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._begun: tuple[int, jax.Array, TrainState] | None = None

    def begin(self, step: int, state: TrainState) -> None:
        """Digests a state after `step` finished steps, if due; asynchronous."""
        if self._every and step % self._every == 0 and state.step.sharding.mesh.size > 1:
            self._begun = step, digests(state), state

    def finish(self) -> None:
        """Waits for the comparison that was started, if any.

        Raises:
          ReplicaMismatchError: If replicas differ.
        """
        if self._begun is None:
            return
        (step, found, state), self._begun = self._begun, None
        if (difference := find_divergence(found, state)) is not None:
            raise ReplicaMismatchError(
                f"After step {step} {difference}. This state is not saved: existing checkpoints "
                "are from identical replicas. Exclude that device, or look for code whose result "
                "depends on the host."
            )
