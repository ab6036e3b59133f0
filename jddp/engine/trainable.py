"""The interface by which training loops, checkpoints and checks know what they train.

`jddp.DataParallel` has it. Another object that has it can be trained, saved and resumed likewise: a
loop knows these methods, and nothing else of the object.
"""

from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from jddp.engine.compiled import CompiledSteps
from jddp.engine.state import TrainState
from jddp.ground.typing import Batch, Batches, Grads, LossFn, Metrics, PyTree


@runtime_checkable
class Trainable(Protocol):
    """An object that takes steps, evaluates and predicts; `jddp.DataParallel` documents each.

    Attributes:
      latest: The newest state; None before there is one.
    """

    latest: TrainState | None

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices."""

    @property
    def steps(self) -> CompiledSteps:
        """The step, known before it runs."""

    def init(self, seed: int = 0, batch: Batch = None) -> TrainState:
        """Makes the first state."""

    def check(self, state: TrainState) -> None:
        """Refuses a state whose memory a step has reused, or that is of another model."""

    def shard_batch(self, batch: Batch) -> Batch:
        """Places this process's rows on its devices."""

    def step(
        self, state: TrainState, batch: Batch, *, loss_limit: float | None = None
    ) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; returns at once. Only `on_spike="skip"` gives a limit."""

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Grads, Metrics]:
        """The gradients of a step, and its metrics."""

    def evaluate(self, state: TrainState, batches: Batches, params: str = "params") -> Metrics:
        """Exact means of loss and metrics over every example."""

    def trace_evaluation(
        self, state: TrainState, batch: Batch, params: str = "params"
    ) -> list[str]:
        """The names of the metrics that `evaluate` returns; runs nothing."""

    def predict(
        self, state: TrainState, batches: Batches, function: LossFn, params: str = "params"
    ) -> PyTree:
        """The results of a function for each row."""

    def model(self, state: TrainState, params: str = "params") -> Any:  # noqa: ANN401  # of Flax
        """A copy of the model: Linen variables, or an NNX module in eval mode."""
