"""Data-parallel SGD, as its definition reads: one replica's step, mapped over the mesh.

    rows ─► forward ─► backward ─► bucketed mean ─► clip ─► optimizer ─► average ─► guard

Gradients of sums over a replica's valid entries are averaged over the replicas, bucket by bucket,
and divided by the mean count. That is the mean over the global batch, however valid entries are
spread. Nothing else is sent but one small vector of sums and counts, and the statistics of
synchronized batch norm.
"""

import dataclasses

import jax
from jax import P
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Wrapped
from jaxtyping import Array

from jddp.engine.guard import limited
from jddp.engine.mesh import input_specs, over_replicas, platform, shardings
from jddp.engine.micro_batches import Local, MicroBatches
from jddp.engine.spec import EveryStep, Step
from jddp.engine.state import Inputs, TrainState, name_of
from jddp.jaxprs import has_random_bits
from jddp.modules.metrics import Sums, mean_tree, means
from jddp.modules.reached import reached_by, uses_constant_key
from jddp.reduce.average import compiler_options
from jddp.reduce.plan import BucketPlan
from jddp.typing import Grads, Leaf, Metrics, ModelState, OptState, Params, PyTree


def replica_step(
    step: Step, plan: BucketPlan, state: TrainState, inputs: Inputs
) -> tuple[TrainState, Metrics]:
    """One optimizer step on one replica's share of the batch."""
    local = step.replicas.run(step.backward, step.guard.scale, state, inputs)
    grads, after, metrics = global_mean(step, plan, state, local)

    def update(grads: Grads, loss: Array) -> tuple[Params, OptState, Metrics]:
        # Clipped after the mean: clipped on each replica, the result would depend on how rows are
        # spread.
        grads, norm = step.clip(grads, step.view)
        return *step.optimizer.update(grads, state, plan, step.view, loss), norm

    params, opt_state, norm = step.replicas.separate(update, state, grads, metrics["loss"])
    after = after.replace(step=state.step + 1, params=params, opt_state=opt_state)
    # After the update, since an outer step averages parameters; before the moving average, which is
    # to follow the parameters that replicas then share.
    after = step.sync.settle(step.reducer, local, state, after)
    after = step.average(state, after)
    # Last, so that a step that is not finite changes nothing but counts, whatever part made it so.
    # The verdict is the same on every replica.
    after, verdict = step.guard.accept(state, after, (metrics["loss"], grads), step.view)
    after, limit = limited(inputs.loss_limit, state, after, metrics["loss"])
    return after, {**metrics, **norm, **verdict, **limit}


def global_mean(
    step: Step, plan: BucketPlan, state: TrainState, local: Local
) -> tuple[Grads, TrainState, Metrics]:
    """The mean gradient and the metrics of the global batch, and the state that its rows leave."""
    grads, hook = step.sync.mean(step.reducer, plan, local, state)
    # Once for all micro-batches: links between groups may be slow.
    grads = step.backward.source.mean_of_groups(grads)
    sums = step.replicas.sum(local.sums)
    # Gradients of sums have been averaged; divided by the mean count they are the global mean.
    count = step.sync.count(state, local.count, step.replicas.mean_count(sums))
    grads = mean_tree(grads, count * local.units.cotangent)
    comm_state = dataclasses.replace(state.comm_state, hook=hook)
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
    spec: Step, plan: BucketPlan, mesh: Mesh, layouts: TrainState, *, donate: bool
) -> Wrapped:
    """Returns `step(state, inputs)` over the mesh, which returns a new state and global metrics."""
    spec = spec.placed(layouts.params)

    def step(state: TrainState, inputs: Inputs) -> tuple[TrainState, Metrics]:
        state, metrics = replica_step(spec, plan, spec.replicas.enter(state, layouts), inputs)
        return spec.replicas.leave(state, layouts), metrics

    placed = shardings(layouts, mesh)
    mapped = over_replicas(step, mesh, (placed, input_specs(mesh)), (placed, P()))
    # Old and new state share memory: without donation a step needs parameters and optimizer state
    # twice.
    donated = (0,) if donate else ()
    return spec.replicas.jit(mapped, compiler_options(spec.reducer, platform(mesh)), donated)


def make_gradients(spec: Step, plan: BucketPlan, mesh: Mesh, layouts: TrainState) -> Wrapped:
    """Returns `gradients(state, inputs)` over the mesh: both are global, the state is kept."""
    # Local steps average nothing, and this is the mean all the same.
    spec = dataclasses.replace(spec, sync=EveryStep()).placed(layouts.params)

    def gradients(state: TrainState, inputs: Inputs) -> tuple[Grads, Metrics]:
        return replica_gradients(spec, plan, spec.replicas.enter(state, layouts), inputs)

    in_specs = (shardings(layouts, mesh), input_specs(mesh))
    mapped = over_replicas(gradients, mesh, in_specs, P())
    return spec.replicas.jit(mapped, compiler_options(spec.reducer, platform(mesh)))


@dataclasses.dataclass(frozen=True)
class Traced:
    """Facts from the traced passes of one replica.

    Attributes:
      ready: Order in which gradients are finished, `Backward.ready`.
      num_looped: Number of gradients that leave a loop, `Backward.num_looped`.
      sums: Shapes of the sums of loss and metrics.
      uses_rng: Whether one of the passes uses random numbers.
      has_constant_key: Whether the forward pass uses random numbers of a key made from constants.
      has_batch_statistics: Whether rows reach statistics of a batch norm; False where a step has
        but one micro-batch, of which nobody asks.
      forward: Equations of the forward pass of all replicas. Its results are the sums, the other
        state of the model, and the constants of the backward pass.
      backward: Equations of the backward pass of one replica.
      inputs: Paths of the inputs of the forward pass.
    """

    ready: tuple[int | None, ...]
    num_looped: int
    sums: Sums
    uses_rng: bool
    has_constant_key: bool
    has_batch_statistics: bool
    forward: ClosedJaxpr
    backward: Jaxpr
    inputs: tuple[str, ...]


def trace(step: Step, mesh: Mesh | AbstractMesh, state: TrainState, inputs: Inputs) -> Traced:
    """Traces a replica's forward and backward pass. Computes nothing.

    Args:
      step: The parts of the step.
      mesh: The mesh, for the size of its axis.
      state: Shapes of one replica's state.
      inputs: Shapes of the rows of one micro-batch, and of constants.
    """
    traced = []

    def replica(state: TrainState, inputs: Inputs) -> tuple[Sums, ModelState, list[Leaf]]:
        backward, sums, model_state = step.backward.trace(state, inputs)
        traced.append(backward)
        return sums, model_state, backward.traced.consts

    # Mapped as the step is, so that a model that names the axis of the replicas can be traced; but
    # nothing is reduced, so specs that are not true do no harm.
    program = over_replicas(replica, mesh, P(), P())
    forward, results = jax.make_jaxpr(program, return_shape=True)(state, inputs)
    (backward,) = traced
    step.replicas.check(forward.jaxpr)
    # Both passes: a custom backward pass may use random numbers where the forward pass does not.
    draws = has_random_bits(forward.jaxpr) or has_random_bits(backward.traced.jaxpr)
    is_parted = step.backward.num > 1
    given = state, inputs
    return Traced(
        ready=backward.ready,
        num_looped=backward.num_looped,
        sums=results[0],
        uses_rng=draws,
        has_constant_key=draws and uses_constant_key(forward.jaxpr),
        has_batch_statistics=is_parted and _reach_statistics(step, forward.jaxpr, given, results),
        forward=forward,
        backward=backward.traced.jaxpr,
        inputs=tuple(name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(given)),
    )


def trace_loss(
    passes: MicroBatches, mesh: Mesh | AbstractMesh, state: TrainState, inputs: Inputs
) -> Jaxpr:
    """Traces the loss of a micro-batch of one replica, whose inputs are the parameters.

    Args:
      passes: The forward pass.
      mesh: The mesh, for the size of its axis.
      state: Shapes of one replica's state.
      inputs: Shapes of the rows, and of constants.
    """
    traced: list[ClosedJaxpr] = []

    def replica(state: TrainState, inputs: Inputs) -> None:
        batch = inputs.rows, state.key, inputs.constants

        def loss(params: Params) -> PyTree:
            return passes.forward(params, state.model_state, *batch)

        traced.append(jax.make_jaxpr(loss)(state.params))

    jax.eval_shape(over_replicas(replica, mesh, P(), P()), state, inputs)
    return traced[0].jaxpr


def _reach_statistics(
    step: Step, forward: Jaxpr, given: tuple[TrainState, Inputs], results: PyTree
) -> bool:
    """Whether rows reach statistics of a batch norm in the traced forward pass."""
    _, after, _ = results
    is_statistic = [
        step.model.is_statistic(path) for path, _ in jax.tree_util.tree_leaves_with_path(after)
    ]
    state, inputs = given
    rows = jax.tree.map(lambda _: True, inputs.rows)
    constants = jax.tree.map(lambda _: False, inputs.constants)
    labels = jax.tree.map(lambda _: False, state), Inputs(rows, constants)
    reached = reached_by(forward, jax.tree.leaves(labels))
    labels = jax.tree.unflatten(jax.tree.structure(results), reached)
    of_state = jax.tree.leaves(labels[1])
    return any(x and y for x, y in zip(of_state, is_statistic, strict=True))
