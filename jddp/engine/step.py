"""Data-parallel SGD, as its definition reads: one replica's step, mapped over the mesh.

    rows ─► forward ─► backward ─► bucketed mean ─► clip ─► optimizer ─► average ─► guard

Gradients of sums over a replica's valid entries are averaged over the replicas, bucket by bucket,
and divided by the mean count. That is the mean over the global batch, however valid entries are
spread. Nothing else is sent but one small vector of sums and counts, and the statistics of
synchronized batch norm.
"""

import dataclasses

from jax import P
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array

from jddp.engine.guard import limited
from jddp.engine.mesh import input_specs, over_replicas, platform, shardings
from jddp.engine.micro_batches import Local
from jddp.engine.spec import EveryStep, Step
from jddp.engine.state import Inputs, TrainState
from jddp.ground.typing import Grads, Metrics, OptState, Params
from jddp.modules.metrics import mean_tree, means
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import compiler_options


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
