"""A step as a value made of parts, one for each question.

    step.backward     MicroBatches               how rows become gradients, and when these leave
    step.replicas     Devices | FixedReplicas    rows of a replica, order of sums
    step.reducer      Reducer                    in what form gradients are sent
    step.sync         EveryStep | LocalSteps     when replicas synchronize
    step.clip         Clip                       limit of the mean gradient
    step.optimizer    PlacedOptimizer | Zero1    parameters that a replica updates
    step.placement    Placement | FullySharded   placement of the parameters
    step.average      Average                    moving average of the parameters
    step.guard        Guard                      steps that count, the loss scale

Where there are two, the base class says what a part promises the step, and is the simpler one. An
option chooses a part, once and in the part's own module; the step itself tests no option.
"""

import functools
from dataclasses import dataclass, replace
from typing import final

from jddp.engine.guard import Guard
from jddp.engine.micro_batches import MicroBatches
from jddp.engine.moving_average import Average
from jddp.engine.optimizer import PlacedOptimizer
from jddp.engine.placement import Placement
from jddp.engine.replicas import Replicas
from jddp.engine.sync import Synchronization
from jddp.engine.view import Clip, View, view_of_shards
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
    optimizer: PlacedOptimizer
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
