"""The placement of parameters on the replicas, with their moving average and optimizer state.

    Everywhere      whole on each replica
    FullySharded    each divided over all replicas, along one of its dims

Which parameters are divided, and along which dim, follows from their shapes alone
(`jddp.reduce.units`). A moving average and the optimizer's state have the same shapes, and so the
same placement.

References:
  Rajbhandari et al., "ZeRO", 2020, stage 3. https://arxiv.org/abs/1910.02054. Zhao et al., "PyTorch
  FSDP", VLDB 2023. https://arxiv.org/abs/2304.11277.
"""

import logging
from dataclasses import dataclass
from typing import final

import jax
from jax.sharding import Mesh, NamedSharding

from jddp.engine.mesh import axis_of, platform
from jddp.engine.parameters import WHOLE, DividedParameters, ParameterSource
from jddp.engine.protocols import Placement
from jddp.engine.state import Divided, Layout, Replicated
from jddp.reduce.lazy import Lazy
from jddp.reduce.packing import average_of_shards
from jddp.reduce.plan import BucketPlan, in_mebibytes
from jddp.reduce.reducer import Reducer
from jddp.reduce.shards import Shape
from jddp.reduce.units import Gather, divided_dim
from jddp.typing import Leaf, Params, PyTree


@final
@dataclass(frozen=True)
class Everywhere:
    """Parameters are whole on each replica."""

    part_shape = None

    def layout(self, shape: Shape) -> Layout:
        """Returns the replicated layout."""
        return Replicated()

    def source(self, layouts: PyTree) -> ParameterSource:
        """Returns the source of whole parameters."""
        return WHOLE

    def place(self, params: Params, mesh: Mesh) -> Params:
        """Returns the parameters as they are."""
        return params

    def note(self, plan: BucketPlan, params: Params) -> BucketPlan:
        """Notes nothing."""
        return plan


@final
@dataclass(frozen=True)
class FullySharded:
    """Parameters are divided over all replicas.

    Attributes:
      num: Number of replicas.
      lazy: Evaluation that gathers parameters where they are used.
    """

    num: int
    lazy: Lazy

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of a divided array; the replicated one if no dim fits."""
        dim = divided_dim(shape, self.num)
        return Replicated() if dim is None else Divided(dim, self.num)

    def part_shape(self, shape: Shape) -> Shape:
        """Returns the shape of a replica's part; of one dim at least."""
        layout = self.layout(shape)
        return layout.part_shape(shape) if isinstance(layout, Divided) else shape or (1,)

    def source(self, layouts: PyTree) -> ParameterSource:
        """Returns the source that gathers parameters."""
        found = jax.tree.leaves(layouts)
        dims = tuple(x.dim if isinstance(x, Divided) else None for x in found)
        return DividedParameters(dims, self.num, self.lazy)

    def place(self, params: Params, mesh: Mesh) -> Params:
        """Divides whole parameters, in a program over the mesh."""
        axis = axis_of(mesh)

        def put(x: Leaf) -> Leaf:
            sharding = NamedSharding(mesh, self.layout(x.shape).spec(axis))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(put, params)

    def note(self, plan: BucketPlan, params: Params) -> BucketPlan:
        """Notes which parameters are divided, and which stay whole."""
        leaves = jax.tree.leaves(params)
        kept = [x for x in leaves if self.layout(x.shape) == Replicated()]
        size = in_mebibytes(sum(x.size * x.dtype.itemsize for x in kept))
        return plan.noted(
            f"fsdp: {len(leaves) - len(kept)} parameters are divided over {self.num} replicas, and "
            "in no bucket: their gradients are reduce-scattered inside the backward pass",
            f"fsdp: {len(kept)} parameters, {size} MiB, stay whole: {self.num} divides none of "
            "their dims",
        )


def choose_placement(reducer: Reducer, mesh: Mesh, regather: bool | None) -> Placement:
    """Returns the placement of parameters.

    Args:
      reducer: Reducer of the gradients of whole parameters.
      mesh: The devices.
      regather: Whether divided parameters are gathered again in the backward pass; None for
        parameters that are whole on each replica.
    """
    if regather is None:
        return Everywhere()
    if mesh.size == 1:
        logging.getLogger("jddp").warning("strategy='fsdp' on one device is 'ddp'.")
        return Everywhere()
    gather = Gather(reducer.axis, average_of_shards(platform(mesh)), reducer.wire_dtype)
    return FullySharded(mesh.size, Lazy(gather, reducer.bucket_bytes, keeps=not regather))
