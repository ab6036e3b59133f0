"""The parts of a step: a protocol for each question, and what each part promises the step.

    Replicas           which rows has a replica, and in what order are sums added?
    Synchronization    when do replicas synchronize, and what do they send?
    View               how much of the mean gradient does a replica hold?
    Clip               what is the mean gradient clipped to?
    Optimizer          which parameters does a replica update?
    Placement          how are parameters placed on the replicas?
    MovingAverage      is there a moving average of the parameters?
    StepGuard          which steps count, and what is the loss scale?

Each is implemented by final classes, chosen once from the options (`engine.spec.Step`), so that the
step tests no option. A part knows nothing of another but what its methods are passed. Where a
method runs on the host, its first line ends in that.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import optax
from jax.extend.core import Jaxpr
from jax.stages import Wrapped
from jaxtyping import Array, Float

from jddp.engine.micro_batches import Local, MicroBatches, Scale, ScaleOf
from jddp.engine.parameters import ParameterSource
from jddp.engine.state import Inputs, KeepsOwn, Layout, TrainState
from jddp.modules.metrics import Sums
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import Reducer
from jddp.reduce.shards import Division, Groups, Shape
from jddp.typing import Batch, Grads, HookState, Metrics, ModelState, OptState, Params, Path, PyTree

OPTIMIZER = "optimizer_update"  # the scope of the equations of an optimizer

Evaluate = Callable[[Batch, Array, Array], Sums]  # of a replica's rows, which count, and its key
Function = Callable[..., PyTree]
XlaOptions = dict[str, PyTree] | None
Places = tuple[int, ...]
TraceLoss = Callable[[], Jaxpr] | None  # the loss of the parameters; None where there are no rows
Averaged = tuple[Grads, HookState]
Outcome = tuple[TrainState, Metrics]


@runtime_checkable
class Replicas(Protocol):
    """Which rows a replica has, and in what order results of all replicas are added.

    local = replicas.run(backward, loss_scale, state, inputs)    sums over the rows of this device
    sums = replicas.sum(local.sums)                              sums over all replicas
    """

    @property
    def num(self) -> int | None:
        """The fixed number of replicas; None for one on each device."""

    @property
    def noun(self) -> str:
        """The replicas' name in messages."""

    def total(self, num_devices: int) -> int:
        """Returns the number of replicas on so many devices; runs on the host.

        Raises:
          ConfigError: If they do not divide over the devices.
        """

    def jit(self, function: Function, options: XlaOptions = None, donated: Places = ()) -> Wrapped:
        """Returns the function jitted, with options of XLA and the donated arguments."""

    def enter(self, state: PyTree, layouts: PyTree) -> PyTree:
        """Returns the state as one replica sees it, from this device's part of the global one."""

    def leave(self, state: PyTree, layouts: PyTree) -> PyTree:
        """Returns this device's part of the global state; the inverse of `enter`."""

    def check(self, forward: Jaxpr) -> None:
        """Refuses models that these replicas cannot run, by their traced forward pass.

        Raises:
          ConfigError: If it is such a model.
        """

    def run(
        self, backward: MicroBatches, loss_scale: ScaleOf, state: TrainState, inputs: Inputs
    ) -> Local:
        """Returns gradients, sums and new state of the rows of this device."""

    def sum(self, sums: Sums) -> Sums:
        """Returns sums over all replicas, from those of `run`."""

    def mean_count(self, sums: Sums) -> Float[Array, ""]:
        """Returns the mean number of valid entries of a replica, from the sums over all."""

    def separate(self, function: Function, state: TrainState, *given: PyTree) -> PyTree:
        """Returns `function(*given)`, kept apart from the computation of its arguments or not."""

    def evaluate(self, function: Evaluate, key: Array, rows: Batch, valid: Array) -> Sums:
        """Returns `function(rows, valid, key)` summed over all replicas."""


@runtime_checkable
class Synchronization(Protocol):
    """When replicas synchronize, and what they send."""

    @property
    def every(self) -> int | None:
        """Number of steps from one outer step to the next; None where there are no local steps."""

    @property
    def start(self) -> int:
        """Number of first steps in which gradients are averaged before local steps begin."""

    def init(self, params: Params) -> PyTree:
        """Returns the first `CommState.outer`; () for nothing."""

    def check(self, model_state: ModelState, keeps_own: KeepsOwn) -> None:
        """Refuses other state of the model on which replicas cannot agree; runs on the host.

        Args:
          model_state: Shapes of one replica's other state.
          keeps_own: Function of path and leaf: whether each replica has its own.

        Raises:
          ConfigError: If there is such a leaf.
        """

    def keeps_own(self, path: Path, x: PyTree) -> bool:
        """Whether each replica has its own of a leaf of parameters or the optimizer's state."""

    def layouts(self, state: TrainState, layouts: TrainState) -> TrainState:
        """Returns the layouts of a state whose parameters these replicas have."""

    def sent(self, reducer: Reducer, plan: BucketPlan, params: Params) -> BucketPlan:
        """Returns the plan of the arrays that are sent, from the plan of a step's gradients."""

    def note(self, plan: BucketPlan) -> BucketPlan:
        """Returns the plan with a note on when it is used."""

    def view(self, of_packing: "View") -> "View":
        """Returns the view of a replica on the mean gradient, from the view of the packing."""

    def mean(self, reducer: Reducer, plan: BucketPlan, local: Local, state: TrainState) -> Averaged:
        """Averages gradients.

        Args:
          reducer: Reducer of the gradients.
          plan: The buckets.
          local: Results of this replica.
          state: State before the step.

        Returns:
          The gradients that the replica updates by, and the new state of the hook.
        """

    def count(self, state: TrainState, own: Array, mean: Array) -> Array:
        """Returns the count that gradients are divided by: a replica's own, or the mean of all."""

    def settle(
        self, reducer: Reducer, local: Local, before: TrainState, after: TrainState
    ) -> TrainState:
        """Returns the state after the step, synchronized where that is due.

        Args:
          reducer: Reducer of parameters.
          local: Results of this replica.
          before: State before the step.
          after: State after it.
        """


@runtime_checkable
class OuterStep(Protocol):
    """How replicas agree on parameters after local steps; a part of `jddp.LocalSteps`."""

    def init(self, params: Params) -> dict[str, PyTree]:
        """Returns the first shared state: a dict with "params", the parameters of all replicas."""

    def __call__(
        self, reducer: Reducer, params: Params, outer: dict[str, PyTree]
    ) -> tuple[Params, dict[str, PyTree]]:
        """Returns the replica's parameters after the outer step, and the shared state.

        Args:
          reducer: Reducer of differences of parameters.
          params: Parameters of this replica.
          outer: Shared state since the last outer step.
        """


@runtime_checkable
class View(Protocol):
    """How much of the mean gradient a replica holds.

    A number that is computed from the gradient and must be the same on every replica, such as its
    norm, is taken by the view.
    """

    @property
    def axis(self) -> str:
        """Name of the axis of the replicas."""

    @property
    def differs(self) -> bool:
        """Whether replicas hold different numbers."""

    def norm(self, grads: Grads) -> Float[Array, ""]:
        """Returns the global norm of the gradient that the replica updates by."""

    def metric(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the number to report for all replicas, from what each computed."""

    def shards(self, grads: Grads) -> Grads:
        """Returns the replica's shard of the gradient."""

    def whole(self, grads: Grads, gather: Callable[[Grads], Grads]) -> Grads:
        """Returns the whole gradient; `gather` makes it of the shards of all replicas."""


@runtime_checkable
class Clip(Protocol):
    """Clipping of the mean gradient."""

    def __call__(self, grads: Grads, view: View, /) -> tuple[Grads, Metrics]:
        """Returns the clipped gradients, and metrics of them."""


@runtime_checkable
class Unused(Protocol):
    """Treatment of parameters that no gradient reaches; a part of `Optimizer`."""

    def check(self, plan: BucketPlan) -> None:
        """Refuses a plan with unused parameters, where they are not allowed.

        Raises:
          ConfigError: If there are any, with their names.
        """

    def __call__(self, new: PyTree, old: PyTree, params: Params, plan: BucketPlan) -> PyTree:
        """Returns the parameters and optimizer state to keep of an update.

        Args:
          new: Parameters and optimizer state after it.
          old: The same before it.
          params: The parameters, for their paths.
          plan: The buckets, which know the unused parameters.
        """


@runtime_checkable
class Optimizer(Protocol):
    """The optimizer's update of a replica's parameters."""

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer of whole parameters."""

    @property
    def unused(self) -> Unused:
        """Treatment of parameters that no gradient reaches."""

    def init(self, params: Params, shapes: Params) -> OptState:
        """Returns the first state, on one replica.

        Args:
          params: The replica's parameters, or its parts of them.
          shapes: Shapes of the whole parameters.
        """

    def layouts(self, params: Params) -> PyTree:
        """Returns the `Layout` of each leaf of the state, for parameters of these shapes."""

    def check(self, params: Params) -> None:
        """Refuses an optimizer that the step cannot use; runs on the host.

        Raises:
          ConfigError: If it is one.
        """

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Returns one replica's new parameters, all of them, and its optimizer state.

        Args:
          grads: The averaged gradients, or the replica's shards of them, by `view`.
          state: State before the step, of one replica.
          plan: The buckets.
          view: View of the replica on the mean gradient.
          value: Loss of the step, for optimizers that ask for it.
        """


@runtime_checkable
class Placement(Protocol):
    """Placement of parameters on the replicas, with their average and the optimizer's state."""

    @property
    def division(self) -> Division | None:
        """Division of the parameters; None if they are whole on each replica."""

    @property
    def groups(self) -> Groups | None:
        """Groups of replicas that divide parameters; None where all are whole."""

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of a leaf of the shape of a parameter."""

    def source(self, layouts: PyTree) -> ParameterSource:
        """Returns the source of parameters of these layouts."""

    def note(self, plan: BucketPlan, params: Params, program: TraceLoss) -> BucketPlan:
        """Returns the plan with units and notes of parameters that are in no bucket.

        Args:
          plan: The buckets.
          params: Shapes of the parameters.
          program: Function that traces the loss.
        """


@runtime_checkable
class MovingAverage(Protocol):
    """A moving average of the parameters to evaluate with, or none."""

    def init(self, state: TrainState) -> TrainState:
        """Returns the state with its first average."""

    def __call__(self, before: TrainState, after: TrainState, /) -> TrainState:
        """Returns the state after a step, with the average moved towards its values."""


@runtime_checkable
class StepGuard(Protocol):
    """The guard of a step: which steps count, and the loss scale."""

    @property
    def follows_overflows(self) -> bool:
        """Whether the loss scale changes from step to step."""

    def init(self) -> PyTree:
        """Returns the first `CommState.loss_scale`; () for nothing."""

    def scale(self, state: TrainState) -> Scale:
        """Returns the loss scale of the step that starts from this state."""

    def limited(
        self, limit: Array | None, before: TrainState, after: TrainState, loss: Array
    ) -> Outcome:
        """Returns the state that a step ends with whose loss has a limit; None is no limit."""

    def accept(self, before: TrainState, after: TrainState, numbers: PyTree, view: View) -> Outcome:
        """Returns the state that a step ends with, and metrics of the guard.

        Args:
          before: State before the step, of one replica.
          after: State that the step has computed.
          numbers: Loss and gradients, which must be finite.
          view: View of the replica on the mean gradient.
        """
