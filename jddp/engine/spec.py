"""A step as a value made of parts, one for each question.

    step.backward     MicroBatches, with a BackwardSchedule   how rows become gradients
    step.replicas     Devices | FixedReplicas                 rows of a replica, order of sums
    step.reducer      Reducer, with a Packing and a hook      in what form gradients are sent
    step.sync         EveryStep | LocalSteps                  when replicas synchronize
    step.clip         NoClip | ClipByGlobalNorm               limit of the mean gradient
    step.optimizer    PlacedOptimizer | Zero1                 parameters that a replica updates
    step.placement    Everywhere | FullySharded               placement of the parameters
    step.average      NoAverage | Ema                         moving average of the parameters
    step.guard        NoGuard | SkipNonfinite | DynamicScale  steps that count, the loss scale

What each part promises is written in `engine.protocols`. An option chooses a part, once and in the
part's own module; the step itself tests no option.
"""

import functools
from dataclasses import dataclass, replace
from typing import final

from jddp.engine.micro_batches import MicroBatches
from jddp.engine.protocols import (
    Clip,
    MovingAverage,
    Optimizer,
    Placement,
    Replicas,
    StepGuard,
    Synchronization,
    View,
)
from jddp.engine.view import PartsOfMean, ShardOfMean, WholeMean
from jddp.modules.base import FlaxModel
from jddp.reduce.reducer import Reducer
from jddp.typing import LossFn, PyTree


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
    average: MovingAverage
    guard: StepGuard

    @property
    def axis(self) -> str:
        """Name of the axis of the replicas."""
        return self.reducer.axis

    @functools.cached_property
    def view(self) -> View:
        """The view of one replica on the mean gradient, from packing and synchronization."""
        # Derived and never chosen: a step that took a shard for the whole would be wrong without an
        # error, or wait for a collective that no other replica starts.
        source = self.backward.source
        if source.groups is not None:
            return self.sync.view(PartsOfMean(self.axis, source.dims, source.groups))
        view = ShardOfMean if self.reducer.packing.keeps_shards else WholeMean
        return self.sync.view(view(self.axis))

    def placed(self, layouts: PyTree) -> "Step":
        """The step for parameters of these layouts, as it runs; unplaced, it is traced for plans.

        Facts of a model, such as its buckets and digests, are the same for every placement.
        """
        source = self.placement.source(layouts)
        # The traces of the plan serve a step of the same source.
        same = source == self.backward.source
        return self if same else replace(self, backward=replace(self.backward, source=source))
