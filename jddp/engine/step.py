"""Data-parallel SGD, as its definition reads: one replica's step, mapped over the mesh.

    rows ─► forward ─► backward ─► bucketed mean ─► clip ─► optimizer ─► average ─► guard

Gradients of sums over a replica's valid entries are averaged over the replicas, bucket by bucket,
and divided by the mean count. That is the mean over the global batch, however valid entries are
spread. Nothing else is sent but one small vector of sums and counts, and the statistics of
synchronized batch norm.

A step is a value made of parts, one for each question. `replica_step`, below them, is the step.

    step.backward     MicroBatches               how rows become gradients, and when these leave
    step.replicas     Replicas                    rows of a replica, order of sums
    step.reducer      Reducer                    the form of gradients on the wire
    step.sync         Synchronization | LocalSteps when replicas synchronize
    step.clip         Clip                       limit of the mean gradient
    step.optimizer    PlacedOptimizer | Zero1    parameters that a replica updates
    step.placement    Placement | FullySharded   placement of the parameters
    step.average      Average                    moving average of the parameters
    step.guard        Guard                      steps that count, the loss scale

Where there are two, the base class describes what a part promises the step, and is the simpler
one. An option chooses a part, once and in the part's own module; the step itself tests no option.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, final, runtime_checkable

import jax
import optax
from jax.extend.core import Jaxpr
from jaxtyping import Array, Float

from jddp.engine.guard import Average, Clip, Guard, limited
from jddp.engine.mesh import input_specs, over_replicas, shardings
from jddp.engine.micro_batches import (
    WHOLE,
    Local,
    MicroBatches,
    ParameterSource,
    ScaleOf,
    View,
    view_of_shards,
)
from jddp.engine.state import (
    Inputs,
    KeepsOwn,
    Layout,
    Replicated,
    TrainState,
    enter,
    key_of_replica,
    leave,
)
from jddp.ground.typing import (
    Batch,
    Grads,
    HookState,
    LossFn,
    Metrics,
    ModelState,
    OptState,
    Params,
    Path,
    PyTree,
    Shaped,
    Tree,
)
from jddp.modules.base import FlaxModel
from jddp.modules.metrics import Sums, mean_tree, means, sum_over_replicas
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import Reducer, compiler_options
from jddp.reduce.shards import AlongDim, Groups, Shape

Evaluate = Callable[[Batch, Array, Array], Sums]  # function(rows, valid, key) of one replica
Function = Callable[..., PyTree]
XlaOptions = dict[str, bool | int | str] | None
Places = tuple[int, ...]
TraceLoss = Callable[[], Jaxpr] | None  # traces the loss; None where there are no rows
Averaged = tuple[Grads, HookState]


@dataclass(frozen=True)
class Replicas:
    """The rows of a replica, and the order in which results of all replicas are added.

    Here a replica is a device, and results are added in the order of the all-reduce.

    local = replicas.run(backward, loss_scale, state, inputs)    sums over the rows of this device
    sums = replicas.sum(local.sums)                              sums over all replicas

    Attributes:
      axis: Name of the axis of the devices.
      model: The model.
      num: The fixed number of replicas; None for one on each device.
      noun: The replicas' name in messages.
    """

    axis: str
    model: FlaxModel
    num: int | None = None
    noun: ClassVar[str] = "devices"

    def total(self, num_devices: int) -> int:
        """Returns the number of replicas on so many devices; runs on the host.

        Raises:
          ConfigError: If they do not divide over the devices.
        """
        return num_devices

    def jit(
        self, function: Function, options: XlaOptions = None, donated: Places = ()
    ) -> jax.stages.Wrapped:
        """Returns the function jitted, with options of XLA and the donated arguments."""
        return jax.jit(function, compiler_options=options, donate_argnums=donated)

    def enter(self, state: Tree, layouts: PyTree) -> Tree:
        """Returns the state as one replica sees it, from this device's part of the global one."""
        return enter(state, layouts)

    def leave(self, state: Tree, layouts: PyTree) -> Tree:
        """Returns this device's part of the global state; the inverse of `enter`."""
        return leave(state, layouts)

    def check(self, forward: Jaxpr) -> None:
        """Refuses models that these replicas cannot run, by their traced forward pass.

        Raises:
          ConfigError: If it is such a model.
        """

    def run(
        self, backward: MicroBatches, loss_scale: ScaleOf, state: TrainState, inputs: Inputs
    ) -> Local:
        """Returns gradients, sums and new state of the rows of this device."""
        # The key depends on the replica's number: with one key for all, dropout would drop the same
        # units on each.
        key = key_of_replica(state, jax.lax.axis_index(self.axis))
        return backward(state, inputs, key, loss_scale)

    def sum(self, sums: Sums) -> Sums:
        """Returns sums over all replicas, from the sums that `run` returns on each."""
        return sum_over_replicas(sums, axis=self.axis)

    def mean_count(self, sums: Sums) -> Float[Array, ""]:
        """Returns the mean number of valid entries of a replica, from the sums over all."""
        return sums["loss"].count / jax.lax.axis_size(self.axis)

    def separate(self, function: Callable[..., Tree], state: TrainState, *given: PyTree) -> Tree:
        """Returns `function(*given)`, kept apart from the computation of its arguments or not."""
        return function(*given)

    def evaluate(self, function: Evaluate, key: Array, rows: Batch, valid: Array) -> Sums:
        """Returns `function(rows, valid, key)` summed over all replicas."""
        key = jax.random.fold_in(key, jax.lax.axis_index(self.axis))
        return sum_over_replicas(function(rows, valid, key), axis=self.axis)


class Synchronization:
    """When replicas synchronize, and what they send; here in each step, by averaging gradients.

    Attributes:
      every: Number of steps from one outer step to the next; None where there are no local steps.
      start: Number of first steps in which gradients are averaged before local steps begin.
      alone: Reason why no single device takes the steps of these replicas; "" where one does.
    """

    every: int | None = None
    start: int = 0
    alone: ClassVar[str] = ""

    @property
    def rhythm(self) -> str:
        """Returns "every N steps", for local steps; "" where replicas synchronize in each."""
        return ""

    def runs(self, num_runs: int, *, is_gradient: bool, is_outer: bool) -> float:
        """Returns the runs per step of a collective with `num_runs` in a step that has them all."""
        return num_runs

    def init(self, params: Params) -> PyTree:
        """Returns the first `CommState.outer`; () for nothing."""
        return ()

    def check(self, model_state: ModelState, keeps_own: KeepsOwn) -> None:
        """Refuses other state of the model on which replicas cannot agree; runs on the host.

        Args:
          model_state: Shapes of one replica's other state.
          keeps_own: Function of path and leaf: whether each replica has its own.

        Raises:
          ConfigError: If there is such a leaf.
        """

    def keeps_own(self, path: Path, x: Shaped) -> bool:
        """Whether each replica has its own of a leaf of parameters or the optimizer's state."""
        return False

    def layouts(self, state: TrainState, layouts: TrainState) -> TrainState:
        """Returns the layouts of a state whose parameters these replicas have."""
        return layouts

    def sent(self, reducer: Reducer, plan: BucketPlan, params: Params) -> BucketPlan:
        """Returns the plan of the arrays that are sent, from the plan of a step's gradients."""
        return plan

    def note(self, plan: BucketPlan) -> BucketPlan:
        """Returns the plan with a note on when it is used."""
        return plan

    def view(self, of_packing: View) -> View:
        """Returns the view of a replica on the mean gradient, from the view of the packing."""
        return of_packing

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
        return reducer(local.grads, state.comm_state.hook, plan, local.units)

    def count(self, state: TrainState, own: Array, mean: Array) -> Array:
        """Returns the count that gradients are divided by: a replica's own, or the mean of all."""
        return mean

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
        return after


EVERY_STEP = Synchronization()


@runtime_checkable
class Optimizer(Protocol):
    """The optimizer's update of a replica's parameters; see `jddp.engine.optimizer`."""

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optax optimizer."""

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

    def check_used(self, plan: BucketPlan) -> None:
        """Refuses a plan with unused parameters, where they are not allowed.

        Raises:
          ConfigError: If there are any, with their names.
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


class Placement:
    """Placement of parameters, their average and the optimizer's state; here on each replica."""

    @property
    def division(self) -> AlongDim | None:
        """Division of the parameters; None if they are whole on each replica."""
        return None

    @property
    def groups(self) -> Groups | None:
        """Groups of replicas that divide parameters; None where all are whole."""
        return None

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of a leaf of the shape of a parameter."""
        return Replicated()

    def source(self, layouts: PyTree) -> ParameterSource:
        """Returns the source of parameters of these layouts."""
        return WHOLE

    def note(self, plan: BucketPlan, params: Params, program: TraceLoss) -> BucketPlan:
        """Returns the plan with units and notes of parameters that are in no bucket.

        Args:
          plan: The buckets.
          params: Shapes of the parameters.
          program: Function that traces the loss; None where there are no rows to trace it with.
        """
        return plan


@final
@dataclass(frozen=True)
class Step:
    """The parts of a step.

    Attributes:
      model: The model.
      eval_fn: The loss for evaluation.
      backward: Computation of gradients from a replica's rows.
      replicas: Rows of each replica, and the order in which sums are added.
      reducer: Averaging of the gradients, and the form in which they are sent.
      sync: Synchronization of the replicas, in each step or now and then.
      clip: Clipping of the mean gradient.
      optimizer: Update of all parameters, or of a shard.
      placement: Placement of the parameters on the replicas.
      average: Moving average of the parameters.
      guard: Rule by which steps count, and the loss scale.
    """

    model: FlaxModel
    eval_fn: LossFn
    backward: MicroBatches
    replicas: Replicas
    reducer: Reducer
    sync: Synchronization
    clip: Clip
    optimizer: Optimizer
    placement: Placement
    average: Average
    guard: Guard

    @property
    def axis(self) -> str:
        """Name of the axis of the replicas."""
        return self.reducer.axis

    @functools.cached_property
    def view(self) -> View:
        """The view of one replica on the mean gradient, from packing and synchronization."""
        # Derived and never chosen: a step that took a shard for the whole would be wrong without an
        # error, or wait for a collective that no other replica starts.
        view = view_of_shards if self.reducer.packing.keeps_shards else View
        return self.sync.view(self.backward.source.view(view(self.axis)))

    def placed(self, layouts: PyTree) -> "Step":
        """The step for parameters of these layouts, as it runs; unplaced, it is traced for plans.

        Facts of a model, such as its buckets and digests, are the same for every placement.
        """
        source = self.placement.source(layouts)
        # The traces of the plan serve a step of the same source.
        same = source == self.backward.source
        return self if same else replace(self, backward=replace(self.backward, source=source))


def replica_step(
    step: Step, plan: BucketPlan, state: TrainState, inputs: Inputs
) -> tuple[TrainState, Metrics]:
    """One optimizer step on one replica's share of the batch."""
    local = step.replicas.run(step.backward, step.guard.scale, state, inputs)
    return replica_update(step, plan, state, local, inputs.loss_limit)


def replica_update(
    step: Step, plan: BucketPlan, state: TrainState, local: Local, loss_limit: Array | None
) -> tuple[TrainState, Metrics]:
    """A step from its local gradients on: their mean over the replicas, and the update."""
    grads, after, metrics = global_mean(step, plan, state, local)

    def update(grads: Grads, loss: Array) -> tuple[Params, OptState, Metrics]:
        # Clipped after the mean: clipped on each replica, the result would depend on how rows are
        # spread.
        grads, norm = step.clip(grads, step.view)
        return *step.optimizer.update(grads, state, plan, step.view, loss), norm

    params, opt_state, norm = step.replicas.separate(update, state, grads, metrics["loss"])
    after = after.replace(step=state.step + 1, params=params, opt_state=opt_state)
    # Replicas synchronize after the update, since an outer step averages parameters, and before the
    # moving average, which follows the parameters that replicas then share.
    after = step.sync.settle(step.reducer, local, state, after)
    after = step.average(state, after)
    # The guard comes last, so that a step that is not finite changes nothing but counts, whatever
    # part made it so. The verdict is the same on every replica.
    after, verdict = step.guard.accept(state, after, (metrics["loss"], grads), step.view)
    after, limit = limited(loss_limit, state, after, metrics["loss"])
    return after, {**metrics, **norm, **verdict, **limit}


def global_mean(
    step: Step, plan: BucketPlan, state: TrainState, local: Local
) -> tuple[Grads, TrainState, dict[str, Array]]:
    """The mean gradient and the metrics of the global batch, and the state that its rows leave."""
    grads, hook = step.sync.mean(step.reducer, plan, local, state)
    # Groups average once for all micro-batches: links between groups may be slow.
    grads = step.backward.source.mean_of_groups(grads)
    sums = step.replicas.sum(local.sums)
    # Gradients of sums have been averaged; divided by the mean count they are the global mean.
    count = step.sync.count(state, local.count, step.replicas.mean_count(sums))
    grads = mean_tree(grads, count * local.units.cotangent)
    comm_state = replace(state.comm_state, hook=hook)
    after = state.replace(model_state=local.model_state, comm_state=comm_state)
    return grads, after, means(sums)


def replica_gradients(
    step: Step, plan: BucketPlan, state: TrainState, inputs: Inputs
) -> tuple[Grads, Metrics]:
    """A step as far as its averaged gradients, and its metrics."""
    local = step.replicas.run(step.backward, step.guard.scale, state, inputs)
    grads, _, metrics = global_mean(step, plan, state, local)
    # With ZeRO-1 a replica holds its shard of the mean: only this function gathers the rest.
    grads = step.view.whole(grads, lambda shards: step.reducer.gather(shards, state.params, plan))
    return grads, metrics


def make_step(
    spec: Step, plan: BucketPlan, mesh: jax.sharding.Mesh, layouts: TrainState, *, donate: bool
) -> jax.stages.Wrapped:
    """Returns `step(state, inputs)` over the mesh, which returns a new state and global metrics."""
    spec = spec.placed(layouts.params)

    def step(state: TrainState, inputs: Inputs) -> tuple[TrainState, Metrics]:
        state, metrics = replica_step(spec, plan, spec.replicas.enter(state, layouts), inputs)
        return spec.replicas.leave(state, layouts), metrics

    placed = shardings(layouts, mesh)
    mapped = over_replicas(step, mesh, (placed, input_specs(mesh)), (placed, jax.P()))
    # Old and new state share memory: without donation a step needs parameters and optimizer state
    # twice.
    donated = (0,) if donate else ()
    return spec.replicas.jit(mapped, compiler_options(spec.reducer, mesh.devices.flat[0]), donated)


def make_gradients(
    spec: Step, plan: BucketPlan, mesh: jax.sharding.Mesh, layouts: TrainState, *, donate: bool
) -> jax.stages.Wrapped:
    """Returns `gradients(state, inputs)` over the mesh: both are global.

    The state is kept, whether a step would donate it or not.
    """
    del donate
    # Local steps average no gradients, but this function returns the mean.
    spec = replace(spec, sync=EVERY_STEP).placed(layouts.params)

    def gradients(state: TrainState, inputs: Inputs) -> tuple[Grads, Metrics]:
        return replica_gradients(spec, plan, spec.replicas.enter(state, layouts), inputs)

    in_specs = (shardings(layouts, mesh), input_specs(mesh))
    mapped = over_replicas(gradients, mesh, in_specs, jax.P())
    return spec.replicas.jit(mapped, compiler_options(spec.reducer, mesh.devices.flat[0]))
