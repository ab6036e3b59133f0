"""Parameters divided along one of their dims, over all replicas or over the replicas of each group.

Which parameters are divided, and along which dim, follows from their shapes alone
(`jddp.reduce.shards`). A moving average and the optimizer's state have the same shapes, and so the
same placement.

References:
  Rajbhandari et al., "ZeRO", 2020, stage 3. https://arxiv.org/abs/1910.02054. Zhao et al., "PyTorch
  FSDP", VLDB 2023. https://arxiv.org/abs/2304.11277.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import jax

from jddp.engine.micro_batches import WHOLE, Loss, ParameterSource, Pullback, View, view_of_parts
from jddp.engine.state import Divided, Layout, Replicated, name_of
from jddp.engine.step import Placement, TraceLoss
from jddp.ground.typing import Grads, Params, Path, PyTree, Shaped, Tree, in_mebibytes
from jddp.reduce.lazy import CONSTANT, PARAMETERS, Lazy, Origin, forget
from jddp.reduce.plan import BucketPlan
from jddp.reduce.shards import AlongDim, Groups, Shape, divided_dim
from jddp.reduce.units import Part, list_units

Dims = tuple[int | None, ...]  # dims along which leaves are divided


@final
@dataclass(frozen=True)
class FullySharded(Placement):
    """Parameters are divided over the replicas of each group.

    Attributes:
      lazy: Evaluation that gathers parameters where they are used.
    """

    lazy: Lazy

    @property
    def groups(self) -> Groups:
        """Groups of replicas; one of all, if there are no others."""
        return self.lazy.gather.groups

    def layout(self, shape: Shape) -> Layout:
        """Returns the layout of a divided array; the replicated one if no dim fits."""
        dim = divided_dim(shape, self.groups.size)
        return Replicated() if dim is None else Divided(dim, self.groups.size)

    @property
    def division(self) -> AlongDim:
        """The division along dims."""
        return AlongDim(self.lazy.gather.axis, self.groups)

    def source(self, layouts: PyTree) -> ParameterSource:
        """Returns the source that gathers parameters."""
        found = jax.tree.leaves(layouts)
        dims = tuple(x.dim if isinstance(x, Divided) else None for x in found)
        return DividedParameters(dims, self.lazy)

    def note(self, plan: BucketPlan, params: Params, program: TraceLoss) -> BucketPlan:
        """Notes the units of divided parameters, and which parameters stay whole."""
        leaves = jax.tree.leaves(params)
        kept = [x for x in leaves if self.layout(x.shape) == Replicated()]
        divided = [x for x in leaves if self.layout(x.shape) != Replicated()]
        gathered, num = "once" if self.lazy.keeps else "twice", self.groups.size
        plan = replace(plan, group_size=num)
        if self.groups.num > 1:
            plan = plan.noted(
                f"fsdp: {self.groups.num} groups of {num} replicas, each with all parameters"
            )
        plan = plan.noted(
            f"fsdp: divided over {num} replicas, in no bucket: {_size_of(divided)},",
            f"  all-gathered {gathered} and reduce-scattered once for each micro-batch",
            f"fsdp: whole, as {num} divides none of their dims: {_size_of(kept)}",
        )
        if program is None:
            return plan
        parts = [self._part_of(path, x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
        num_passes = 1 if self.lazy.keeps else 2
        units = [*list_units(program(), parts, self.lazy.unit_bytes, num_passes=num_passes)]
        return replace(plan, units=tuple(units))

    def _part_of(self, path: Path, x: Shaped) -> Part | None:
        layout = self.layout(x.shape)
        if not isinstance(layout, Divided):
            return None
        value = jax.ShapeDtypeStruct(self.division.part_shape(x.shape), x.dtype)
        return Part(value, layout.dim, x.shape, name=name_of(path))


@final
@dataclass(frozen=True)
class DividedParameters(ParameterSource):
    """Each replica has a part of the parameters.

    Attributes:
      dims: Dims along which parameters are divided, leaf by leaf; None for one that is whole.
      lazy: Evaluation that gathers parameters where they are used.
    """

    dims: Dims
    lazy: Lazy

    @property
    def groups(self) -> Groups:
        """Groups of replicas."""
        return self.lazy.gather.groups

    def view(self, of_packing: View) -> View:
        """Returns the view of parts."""
        return view_of_parts(of_packing.axis, self.dims, self.groups)

    def run(
        self, function: Callable[[Params], Tree], params: Params, lazy: Lazy | None = None
    ) -> Tree:
        """Traces the function for whole parameters, and gathers them as it evaluates the trace."""
        # By default nothing is kept apart for a backward pass, as there is none.
        lazy = lazy or replace(self.lazy, keeps=True)
        leaves, treedef = jax.tree.flatten(params)
        parts = [*map(self._part, leaves, self.dims)]
        both = zip(parts, leaves, strict=True)
        shapes = [jax.ShapeDtypeStruct(x.shape, leaf.dtype) for x, leaf in both]
        traced, results = jax.make_jaxpr(function, return_shape=True)(
            jax.tree.unflatten(treedef, shapes)
        )
        made = [Origin(PARAMETERS if isinstance(x, Part) else CONSTANT, moves=True) for x in parts]
        return jax.tree.unflatten(jax.tree.structure(results), lazy.evaluate(traced, parts, made))

    def linearize(self, loss: Loss[Tree], params: Params) -> tuple[jax.Array, Pullback, Tree]:
        """Differentiates; the backward pass gathers parameters again, unless they are kept."""

        def run(params: Params) -> tuple[jax.Array, Tree]:
            return self.run(loss, params, self.lazy)

        if self.lazy.keeps:
            return WHOLE.linearize(run, params)
        # CSE may merge equal operations of a model, as it may without `jax.checkpoint`: parameters
        # are kept apart below.
        repeated = jax.checkpoint(run, policy=forget, prevent_cse=False)
        value, pullback, aux = jax.vjp(repeated, params, has_aux=True)
        # A constant result of `jax.checkpoint` is not an array yet.
        return value, _after(pullback, params, value), jax.tree.map(jax.numpy.asarray, aux)

    def mean_of_groups(self, grads: Grads) -> Grads:
        """Averages parts with the replicas that have the same ones in other groups."""
        if self.groups.num == 1:
            return grads
        leaves, treedef = jax.tree.flatten(grads)
        places = [i for i, dim in enumerate(self.dims) if dim is not None]
        parts = [leaves[i] for i in places]
        means = self.lazy.gather.mean_of_groups(parts, self.lazy.unit_bytes)
        for i, x in zip(places, means, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(treedef, leaves)

    def _part(self, x: jax.Array, dim: int | None) -> jax.Array | Part:
        if dim is None:
            return x
        shape = (*x.shape[:dim], x.shape[dim] * self.groups.size, *x.shape[dim + 1 :])
        return Part(x, dim, shape)


def _size_of(params: list[Shaped]) -> str:
    size = in_mebibytes(sum(x.size * x.dtype.itemsize for x in params))
    return f"{len(params)} parameter{'' if len(params) == 1 else 's'}, {size} MiB"


def _after(pullback: Pullback, params: Params, value: jax.Array) -> Pullback:
    """The pullback, whose parameters are there only after the forward pass."""
    # XLA would see that the backward pass gathers the same parameters as the forward pass, and keep
    # them.
    mine = {id(x) for x in jax.tree.leaves(params)}
    leaves, treedef = jax.tree.flatten(pullback)
    places = [i for i, x in enumerate(leaves) if id(x) in mine]
    later, _ = jax.lax.optimization_barrier(([leaves[i] for i in places], value))
    for i, x in zip(places, later, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)
