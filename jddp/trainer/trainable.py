"""What the loop needs of `jddp.DataParallel`, and all that it knows of it."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from jddp.memory import Memory
from jddp.state import TrainState

PyTree = Any


@runtime_checkable
class Trainable(Protocol):
    """A model, an optimizer and a loss on a mesh; `jddp.DataParallel` says what each does."""

    mesh: Mesh

    @property
    def world(self) -> dict[str, Any]:
        """Over how many processes, devices and parts a step spreads its rows, and statistics."""
        ...

    def draws(self, batch: PyTree) -> bool:
        """Whether a step draws random numbers."""
        ...

    def facts(self, batch: PyTree) -> dict[str, str]:
        """What every process must have alike: shapes of the state, and the step as a program."""
        ...

    def init(self, seed: int = 0, batch: PyTree = None, params: PyTree = None) -> TrainState:
        """Makes the first state."""
        ...

    def kinds(self, state: TrainState) -> TrainState:
        """How each leaf of a state lies on the mesh."""
        ...

    def put(self, batch: PyTree) -> PyTree:
        """Places a batch on the devices."""
        ...

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Mapping[str, Any]]:
        """Takes one optimizer step."""
        ...

    def evaluate(
        self, state: TrainState, batches: Iterable[PyTree], params: str = "params"
    ) -> dict[str, float]:
        """Evaluates exactly."""
        ...

    def memory(self, batch: PyTree, *, accumulate_steps: int | None = None) -> Memory:
        """Measures what a step needs, without running it."""
        ...

    def diagnose(self, state: TrainState, batch: PyTree) -> dict[str, dict[str, float]]:
        """Measures parameters and gradients, layer by layer."""
        ...
