"""The replicas of a step: which rows each has, and how results of all replicas are added.

Devices          a replica on each device
FixedReplicas    a fixed number of replicas, in `jddp.engine.bitwise`
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import jax
from jax import lax
from jax.extend.core import Jaxpr
from jax.stages import Wrapped
from jaxtyping import Array, Float

from jddp.engine.micro_batches import Local, MicroBatches, ScaleOf
from jddp.engine.state import Inputs, TrainState, enter, key_of_replica, leave
from jddp.modules.base import FlaxModel
from jddp.modules.metrics import Sums, sum_over_replicas
from jddp.typing import Batch, PyTree

Evaluate = Callable[[Batch, Array, Array], Sums]  # of a replica's rows, which count, and its key
Function = Callable[..., PyTree]
XlaOptions = dict[str, PyTree] | None
Places = tuple[int, ...]


class Replicas:
    """Which rows a replica has, and in what order results of all replicas are added.

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
    num: int | None
    noun: str

    def total(self, num_devices: int) -> int:
        """Returns the number of replicas on so many devices; runs on the host.

        Raises:
          ConfigError: If they do not divide over the devices.
        """
        return num_devices

    def jit(self, function: Function, options: XlaOptions = None, donated: Places = ()) -> Wrapped:
        """Returns the function jitted, with options of XLA and the donated arguments."""
        return jax.jit(function, compiler_options=options, donate_argnums=donated)

    def enter(self, state: PyTree, layouts: PyTree) -> PyTree:
        """Returns the state as one replica sees it, from this device's part of the global one."""
        return enter(state, layouts)

    def leave(self, state: PyTree, layouts: PyTree) -> PyTree:
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
        # By the replica's number: with one key for all, dropout would drop the same units on each.
        key = key_of_replica(state, lax.axis_index(self.axis))
        return backward(state, inputs, key, loss_scale)

    def sum(self, sums: Sums) -> Sums:
        """Returns sums over all replicas, from those of `run`."""
        return sum_over_replicas(sums, axis=self.axis)

    def mean_count(self, sums: Sums) -> Float[Array, ""]:
        """Returns the mean number of valid entries of a replica, from the sums over all."""
        return sums["loss"].count / lax.axis_size(self.axis)

    def separate(self, function: Function, state: TrainState, *given: PyTree) -> PyTree:
        """Returns `function(*given)`, kept apart from the computation of its arguments or not."""
        return function(*given)

    def evaluate(self, function: Evaluate, key: Array, rows: Batch, valid: Array) -> Sums:
        """Returns `function(rows, valid, key)` summed over all replicas."""
        key = jax.random.fold_in(key, lax.axis_index(self.axis))
        return sum_over_replicas(function(rows, valid, key), axis=self.axis)


@final
@dataclass(frozen=True)
class Devices(Replicas):
    """A replica on each device."""

    axis: str
    model: FlaxModel
    num = None
    noun = "devices"
