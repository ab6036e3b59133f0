"""A step as a value made of parts, one for each question; and which options go together.

    step.backward     MicroBatches, with a BackwardSchedule   how rows become gradients
    step.replicas     Devices | LogicalReplicas               rows of a replica, order of sums
    step.reduction    Reduction, with a Packing and a hook    in what form gradients are sent
    step.sync         EveryStep | LocalSteps                  when replicas synchronize
    step.clip         NoClip | ClipByGlobalNorm               limit of the mean gradient
    step.optimizer    ReplicatedOptimizer | Zero1             parameters that a replica updates
    step.average      NoAverage | Ema                         moving average of the parameters
    step.guard        NoGuard | SkipNonfinite | DynamicScale  steps that count, the loss scale

What each part promises is written in `engine.protocols`. An option chooses a part, once and in the
part's own module; the step itself tests no option.
"""

import functools
from dataclasses import dataclass
from typing import final

from jddp.engine.micro_batches import MicroBatches
from jddp.engine.protocols import (
    Clip,
    MovingAverage,
    Optimizer,
    Replicas,
    StepGuard,
    Synchronization,
    View,
)
from jddp.engine.sync import LocalSteps
from jddp.engine.view import ShardOfMean, WholeMean
from jddp.errors import ConfigError
from jddp.modules.base import FlaxModel
from jddp.reduce.reduction import Reduction
from jddp.typing import LossFn

# Pairs of options that cannot be combined, and why.
REFUSED = {
    ("logical_replicas", "shard_optimizer"): "an update of a shard is computed in other vectors",
    ("logical_replicas", "local_steps"): "local steps depend on the number of devices",
    ("logical_replicas", "comm_hook"): "gradients are added in one order, which no hook keeps",
    ("logical_replicas", "wire_dtype"): "sums on the wire would round by the number of devices",
    ("logical_replicas", "overlap"): "gradients of several replicas are added before any is sent",
    ("local_steps", "shard_optimizer"): "each replica updates all of its own parameters",
    ("local_steps", "comm_hook"): "a hook reduces gradients in each step; see wire_dtype",
}


@final
@dataclass(frozen=True)
class Step:
    """The parts of a step.

    Attributes:
      model: The model.
      eval_fn: The loss for evaluation.
      backward: Computation of gradients from a replica's rows.
      replicas: Rows of each replica, and the order in which sums are added.
      reduction: Form in which gradients are sent, and their averaging.
      sync: Synchronization of the replicas, in each step or now and then.
      clip: Clipping of the mean gradient.
      optimizer: Update of all parameters, or of a shard.
      average: Moving average of the parameters.
      guard: Rule by which steps count, and the loss scale.
    """

    model: FlaxModel
    eval_fn: LossFn
    backward: MicroBatches
    replicas: Replicas
    reduction: Reduction
    sync: Synchronization
    clip: Clip
    optimizer: Optimizer
    average: MovingAverage
    guard: StepGuard

    @property
    def axis(self) -> str:
        """Name of the axis of the replicas."""
        return self.reduction.axis

    @functools.cached_property
    def view(self) -> View:
        """The view of one replica on the mean gradient, from packing and synchronization."""
        # Derived and never chosen: a step that took a shard for the whole would be wrong without an
        # error, or wait for a collective that no other replica starts.
        view = ShardOfMean if self.reduction.packing.keeps_shards else WholeMean
        return self.sync.view(view(self.axis))


def refuse_pairs(**given: object) -> None:
    """Refuses options that cannot be combined.

    Args:
      **given: Values of the options in `REFUSED`; a false one counts as not given.

    Raises:
      ConfigError: If a pair of them is given, with the reason; or if local_steps is a number.
    """
    if not isinstance(every := given["local_steps"], LocalSteps | None):
        raise ConfigError(f"local_steps={every!r}: give jddp.LocalSteps(every={every!r}), or None.")
    # By names of options, and in one table: the parts themselves know nothing of each other.
    for pair, why in REFUSED.items():
        if all(given[name] for name in pair):
            raise ConfigError(f"{' and '.join(pair)} cannot be combined: {why}. Leave one out.")
