"""A replica on each device: which rows it has, and how results of all replicas are added.

The other choice, a fixed number of replicas, is in `jddp.engine.bitwise`.
"""

from dataclasses import dataclass
from typing import final

import jax
from jax import lax
from jax.extend.core import Jaxpr
from jax.stages import Wrapped
from jaxtyping import Array, Float

from jddp.engine.bitwise.logical_replicas import FixedReplicas
from jddp.engine.micro_batches import Local, MicroBatches, ScaleOf
from jddp.engine.protocols import Evaluate, Function, Places, Replicas, XlaOptions
from jddp.engine.state import Inputs, TrainState, enter, key_of_replica, leave
from jddp.modules.base import FlaxModel
from jddp.modules.metrics import Sums, sum_over_replicas
from jddp.typing import Batch, PyTree


@final
@dataclass(frozen=True)
class Devices:
    """A replica on each device; sums in the order of the all-reduce.

    Attributes:
      axis: Name of the axis of the replicas.
      model: The model.
    """

    axis: str
    model: FlaxModel
    num = None
    noun = "devices"

    def total(self, num_devices: int) -> int:
        """Returns the number of devices."""
        return num_devices

    def jit(self, function: Function, options: XlaOptions = None, donated: Places = ()) -> Wrapped:
        """Jits by `jax.jit`."""
        return jax.jit(function, compiler_options=options, donate_argnums=donated)

    def enter(self, state: PyTree, layouts: PyTree) -> PyTree:
        """Squeezes the replica dim."""
        return enter(state, layouts)

    def leave(self, state: PyTree, layouts: PyTree) -> PyTree:
        """Adds the replica dim."""
        return leave(state, layouts)

    def check(self, forward: Jaxpr) -> None:
        """Refuses nothing."""

    def run(
        self, backward: MicroBatches, loss_scale: ScaleOf, state: TrainState, inputs: Inputs
    ) -> Local:
        """Runs all rows of the device as those of one replica."""
        # By the replica's number: with one key for all, dropout would drop the same units on each.
        key = key_of_replica(state, lax.axis_index(self.axis))
        return backward(state, inputs, key, loss_scale)

    def sum(self, sums: Sums) -> Sums:
        """Sums by one all-reduce."""
        return sum_over_replicas(sums, axis=self.axis)

    def mean_count(self, sums: Sums) -> Float[Array, ""]:
        """Divides by the number of devices."""
        return sums["loss"].count / lax.axis_size(self.axis)

    def separate(self, function: Function, state: TrainState, *given: PyTree) -> PyTree:
        """Lets XLA fuse the function with the computation of its arguments."""
        return function(*given)

    def evaluate(self, function: Evaluate, key: Array, rows: Batch, valid: Array) -> Sums:
        """Evaluates all rows of the device at once."""
        key = jax.random.fold_in(key, lax.axis_index(self.axis))
        return sum_over_replicas(function(rows, valid, key), axis=self.axis)


def choose_replicas(axis: str, model: FlaxModel, num: int | None, num_devices: int) -> Replicas:
    """Returns logical replicas of this number, or the devices.

    Raises:
      ConfigError: If they do not divide over the devices.
    """
    replicas = Devices(axis, model) if num is None else FixedReplicas(axis, model, num)
    replicas.total(num_devices)
    return replicas
