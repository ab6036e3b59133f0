"""The interface by which training loops, checkpoints and checks know what they train.

`jddp.DataParallel` has it. Another object that has it can be trained, saved and resumed likewise: a
loop knows these methods, and nothing else of the object.
"""

from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from jddp.engine.mesh import RowSplit
from jddp.engine.planned import Planned
from jddp.engine.program import Form, Program
from jddp.engine.spec import Step
from jddp.engine.state import TrainState, Values
from jddp.reduce.plan import BucketPlan
from jddp.typing import Batch, Batches, Grads, LossFn, Metrics, PyTree, Settings


@runtime_checkable
class Steps(Protocol):
    """A step, known before it runs: its rows, its state, its program."""

    @property
    def spec(self) -> Step:
        """The parts of the step."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of devices."""

    @property
    def rows(self) -> RowSplit:
        """Division of rows over replicas and micro-batches."""

    @property
    def topology(self) -> Settings:
        """Processes, devices and options by which a step divides rows; a checkpoint keeps them."""

    def on(self, mesh: Mesh) -> "Steps":
        """The steps of the same options on another mesh, also of devices that are not there."""

    def layouts(self, state: TrainState) -> TrainState:
        """For each leaf of a state its `jddp.engine.state.Layout`."""

    def abstract_state(self, batch: Batch) -> TrainState:
        """Shapes, dtypes and shardings of a state, for rows of this process or their shapes."""

    def planned(self, batch: Batch) -> Planned:
        """The buckets of a step, and facts from its traced passes; runs nothing."""

    def sent(self, batch: Batch) -> BucketPlan:
        """The plan of the arrays that are sent: gradients, or parameters with local steps."""

    def merged(self, values: Values) -> Values:
        """Values for reading: per-replica values are averaged."""

    def lower(self, batch: Batch, accumulate_steps: int | None = None) -> jax.stages.Lowered:
        """Lowers the step, optionally for another number of micro-batches. Does not run it."""

    def lower_init(self, batch: Batch) -> jax.stages.Lowered:
        """The lowered program that makes a first state from a seed; runs nothing."""

    def program(self, state: TrainState, batch: Batch, form: Form | None = None) -> Program:
        """Digests of model, loss and optimizer; runs nothing."""


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
    def steps(self) -> Steps:
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
        """The names of what `evaluate` returns; runs nothing."""

    def predict(
        self, state: TrainState, batches: Batches, function: LossFn, params: str = "params"
    ) -> PyTree:
        """The results of a function for each row."""

    def model(self, state: TrainState, params: str = "params") -> Any:  # noqa: ANN401  # of Flax
        """A copy of the model: Linen variables, or an NNX module in eval mode."""
