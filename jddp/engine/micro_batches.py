"""Gradients of one replica: its rows run forward and backward, one micro-batch after the other.

Rows are run in one or more micro-batches of equal size, with one reduction for all. Gradients leave
after the backward passes, or inside the last one: then the reduction runs it, bucket by bucket, and
each bucket is sent while the pass continues. The numbers are the same.

The loss is summed over the valid entries, so gradients are gradients of a sum, and the step
divides them by the global count.

A batch norm moves its running statistics each time it runs: k micro-batches, one after the other,
would move them by 1 - momentum ** k. So statistics of the global batch are moved once, by the mean
of the moves of all micro-batches. Other state passes from one micro-batch to the next.

A `View` is the part of the mean gradient that a replica holds: all of it; its shard, with ZeRO-1;
its parts of divided parameters, and all of the others, with FSDP; with local steps its own
gradient, which is no mean.

This room knows models, losses and masks, and nothing of optimizers or meshes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jddp.engine.state import Inputs, TrainState, is_float, widened
from jddp.ground.errors import ConfigError
from jddp.ground.typing import Batch, Grads, LossFn, ModelState, Params, Path, PyTree, Tree
from jddp.modules.base import FlaxModel
from jddp.modules.forward import run_and_settle, trace_state
from jddp.modules.metrics import Sums
from jddp.modules.rows import split_rows
from jddp.reduce.backward import Backward, Finished, Gradients, Running, trace_backward
from jddp.reduce.hooks import Units, power_of_two_within
from jddp.reduce.plan import BucketPlan
from jddp.reduce.shards import Groups, own_shard, whole

Number = int | Array  # number of a micro-batch
MicroBatch = tuple[Batch, Array, PyTree]  # its rows, key and constants
Scale = float | Array
ScaleOf = Callable[[TrainState], Scale]  # the loss scale of a step
Loss = Callable[[Params], tuple[jax.Array, Tree]]
Pullback = Callable[[jax.Array], tuple[Params]]


Join = Callable[[Grads], Grads]
Norm = Float[Array, ""]


@final
@dataclass(frozen=True)
class View:
    """How much of the mean gradient a replica holds; by default all of it.

    A number that is computed from the gradient and must be the same on every replica, such as its
    norm, is taken by the view.

    Attributes:
      axis: Name of the axis of the replicas.
      norm: Function that returns the global norm of the gradient that the replica updates by.
      whole: Function that returns the whole gradient; its second argument is a function that
        makes it of the shards of all replicas.
      is_divided: Whether the replica holds a shard or parts of it.
      is_mean: Whether it is the mean, and not a gradient of the replica's own.
    """

    axis: str
    norm: Callable[[Grads], Norm] = optax.tree.norm
    whole: Callable[[Grads, Join], Grads] = lambda grads, gather: grads
    is_divided: bool = False
    is_mean: bool = True

    @property
    def differs(self) -> bool:
        """Whether replicas hold different numbers."""
        return self.is_divided or not self.is_mean

    def metric(self, x: Norm) -> Norm:
        """Returns the number to report for all replicas, from the number that each computed."""
        if self.is_mean:
            return x
        with jax.named_scope("metrics"):
            # Only for the report: each replica clips by its own norm, and metrics must leave the
            # step equal on all replicas.
            return jax.lax.pmean(x, self.axis)

    def shards(self, grads: Grads) -> Grads:
        """Returns the replica's shard of the gradient."""
        return grads if self.is_divided else own_shards(grads, self.axis)


def view_of_shards(axis: str) -> View:
    """Returns the view of a replica that holds its shard of the mean."""

    def norm(grads: Grads) -> Norm:
        with jax.named_scope("metrics"):
            # Squares are added, and the root is taken of their sum. Zeros that pad shards add
            # nothing.
            return jnp.sqrt(jax.lax.psum(optax.tree.norm(grads, squared=True), axis))

    return View(axis, norm, lambda grads, gather: gather(grads), is_divided=True)


def view_of_parts(axis: str, dims: tuple[int | None, ...], groups: Groups) -> View:
    """Returns the view of a replica that holds its parts of the mean.

    Args:
      axis: Name of the axis of the replicas.
      dims: Dims along which gradients are divided, leaf by leaf; None for one that is whole.
      groups: Groups of replicas; each group has all parts.
    """

    def norm(grads: Grads) -> Norm:
        leaves = jax.tree.leaves(grads)
        parts = [x for x, dim in zip(leaves, dims, strict=True) if dim is not None]
        others = [x for x, dim in zip(leaves, dims, strict=True) if dim is None]
        with jax.named_scope("metrics"):
            squares = jax.lax.psum(optax.tree.norm(parts, squared=True), axis)
            if groups.num > 1:
                # Each group has every part; a sum over one group alone might round in its own way.
                squares /= groups.num
            return jnp.sqrt(squares + optax.tree.norm(others, squared=True))

    def join(grads: Grads, gather: Join) -> Grads:
        leaves, treedef = jax.tree.flatten(grads)
        one = functools.partial(whole, axis=axis, groups=groups)
        return jax.tree.unflatten(treedef, map(one, leaves, dims))

    return View(axis, norm, join, is_divided=True)


def own_shards(tree: PyTree, axis: str) -> PyTree:
    """Returns this replica's shards of arrays that it has as a whole."""
    return jax.tree.map(functools.partial(own_shard, axis=axis), tree)


class ParameterSource:
    """The source from which a replica's model gets its parameters; here it has all of them.

    A model is run and differentiated by the source of its parameters, and knows nothing of it.
    """

    def view(self, of_packing: View) -> View:
        """Returns the view of a replica on the mean gradient, from the view of the packing."""
        return of_packing

    def run(self, function: Callable[[Params], Tree], params: Params) -> Tree:
        """Returns `function` of the whole parameters.

        Args:
          function: Function of whole parameters.
          params: This replica's parameters, or its parts of them.
        """
        return function(params)

    def linearize(self, loss: Loss[Tree], params: Params) -> tuple[jax.Array, Pullback, Tree]:
        """Returns the loss, its pullback and its auxiliary values, as `jax.vjp` does.

        The pullback returns this replica's gradients of whole parameters, and of the others its
        part of the mean gradient of its group of replicas.
        """
        linearized: tuple[jax.Array, Pullback, Tree] = jax.vjp(loss, params, has_aux=True)
        return linearized

    def mean_of_groups(self, grads: Grads) -> Grads:
        """Averages the gradients of divided parameters over all groups; leaves the others."""
        return grads


WHOLE = ParameterSource()


@dataclass(frozen=True)
class Local:
    """Results of one replica from its rows.

    Attributes:
      grads: Gradients of the summed loss, in `units`.
      sums: Sums of the loss and metrics.
      model_state: The model's other state after the rows.
      units: Factors of the gradients.
    """

    grads: Gradients
    sums: Sums
    model_state: ModelState
    units: Units

    @property
    def count(self) -> Array:
        """Number of valid entries of its loss."""
        return self.sums["loss"].count


class Linearized(NamedTuple):
    """A micro-batch that has run forward, and its backward pass.

    Attributes:
      backward: Function of the loss scale that returns gradients.
      finish: Function applied to each gradient where it is taken from the backward pass.
      sums: Sums of the loss and metrics.
      model_state: The model's other state after it.
    """

    backward: Callable[[Array], Grads]
    finish: Callable[[Array], Array]
    sums: Sums
    model_state: ModelState


class Accumulated(NamedTuple):
    """Sums over micro-batches; over none of them, without gradients and sums.

    Attributes:
      grads: Gradients; half-precision gradients are widened to float32.
      model_state: The model's other state after the last micro-batch.
      sums: Sums of the loss and metrics.
    """

    grads: Grads
    model_state: ModelState
    sums: Sums


@final
@dataclass(frozen=True)
class MicroBatches:
    """The rows of a replica in equal parts, one after the other: gradient accumulation.

    Attributes:
      model: The model.
      loss_fn: The loss.
      num: Number of micro-batches.
      overlaps: Whether gradients leave inside the last backward pass, and not after all passes.
      is_scaled: Whether there is a loss scale.
      source: Where the model gets its parameters from.

    Raises:
      ConfigError: If there are less than one.
    """

    model: FlaxModel
    loss_fn: LossFn
    num: int
    overlaps: bool = False
    is_scaled: bool = False
    source: ParameterSource = WHOLE

    def __post_init__(self) -> None:
        """Refuses a number out of range."""
        if self.num < 1:
            raise ConfigError(f"accumulate_steps is at least 1; got {self.num}.")

    @functools.cached_property
    def forward(self) -> Callable[..., tuple[Array, tuple[Sums, ModelState]]]:
        """`forward(params, model_state, rows, key, constants)`: the loss in training.

        The plan, the step and each micro-batch run the model; for rows of one form JAX traces it
        once for all of them, since they call one jitted function.
        """
        run = functools.partial(run_and_settle, self.model, self.loss_fn)
        # Jitted only for its cache of traces, and therefore inlined.
        return jax.jit(run, inline=True)

    def __call__(self, state: TrainState, inputs: Inputs, key: Array, loss_scale: ScaleOf) -> Local:
        """Runs a replica's rows forward and backward.

        Args:
          state: State of one replica.
          inputs: Rows of the replica, and constants.
          key: Key of its random numbers in this step.
          loss_scale: Function of the state that returns the loss scale of the step.
        """
        if self.overlaps:
            return self._with_last_pass(state, inputs, key, loss_scale)
        # All micro-batches run in one loop: gradients are finished before a bucket leaves.
        scale = loss_scale(state)
        total = self.accumulate(state, self.split(inputs, key), self.num, scale)
        # Casts back to the dtypes of the parameters: gradients are planned, sent and given to optax
        # in these.
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), total.grads, state.params)
        units = self.units(state.params, total.sums, scale)
        return Local(Finished(grads), total.sums, total.model_state, units)

    def _with_last_pass(
        self, state: TrainState, inputs: Inputs, key: Array, loss_scale: ScaleOf
    ) -> Local:
        """Runs all micro-batches, but for the last backward pass, which the reduction runs."""
        take, scale = self.split(inputs, key), loss_scale(state)
        # The last micro-batch stands outside the scan: a loop is one equation, so buckets could
        # only be sent at its end. Only in the last backward pass are the sums of gradients
        # finished, one by one.
        last = self.num - 1
        total = self.accumulate(state, take, last, scale)
        run = self.linearize(state, self.before(state, total.model_state), take(last))
        earlier = jax.tree.leaves(total.grads)

        def finish(i: int, x: Array) -> Array:
            # NaN of an empty micro-batch is replaced before the earlier gradients are added to it.
            x = run.finish(x)
            if not earlier:
                return x
            return (x.astype(earlier[i].dtype) + earlier[i]).astype(x.dtype)

        backward = trace_backward(lambda one: run.backward(one * scale))
        # Sums need no reduction inside the pass: they are sent after it, in one small vector.
        sums = jax.tree.map(jnp.add, total.sums, run.sums) if earlier else run.sums
        units = self.units(state.params, sums, scale)
        model_state = self.after(state, total.model_state, run.model_state)
        return Local(Running(backward, finish), sums, model_state, units)

    def note(self, plan: BucketPlan) -> BucketPlan:
        """Returns the plan with a note on when buckets leave."""
        when = "on: buckets leave inside" if self.overlaps else "off: buckets leave after"
        return plan.noted(f"overlap {when} the backward pass")

    def trace(self, state: TrainState, inputs: Inputs) -> tuple[Backward, Sums, ModelState]:
        """Traces the backward pass over one micro-batch, without running it.

        Returns:
          The traced pass, the sums, and the model's other state after the micro-batch.
        """
        batch = inputs.rows, state.key, inputs.constants
        run = self.linearize(state, state.model_state, batch)
        return trace_backward(run.backward), run.sums, run.model_state

    def varying(self, state: TrainState, inputs: Inputs) -> PyTree:
        """Labels (`jddp.modules.forward`) of the new other state, from shapes of one replica."""
        first = jax.eval_shape(lambda *given: self.split(*given)(0), inputs, state.key)
        return trace_state(self.model, self.forward, state.params, state.model_state, *first)[1]

    def linearize(self, state: TrainState, before: ModelState, batch: MicroBatch) -> Linearized:
        """Runs a micro-batch forward.

        Args:
          state: State of one replica.
          before: The model's other state before the micro-batch.
          batch: The micro-batch.
        """

        def forward(params: Params) -> tuple[Array, tuple[Sums, ModelState]]:
            return self.forward(params, before, *batch)

        loss, pullback, (sums, model_state) = self.source.linearize(forward, state.params)
        # The loss is a sum over valid entries, not a mean: a replica knows its own count, but the
        # mean needs the global one. With sums, no bucket waits for it.
        start = self.start(state.params, sums["loss"].num_entries * self.num)
        # The global batch has valid rows whenever the step has; one replica's rows may all be
        # masked, and statistics of no row are 0 / 0, which is NaN.
        is_empty: Array | None = None
        if self.model.batch_norm != "sync" and jax.tree.leaves(before):
            is_empty = sums["loss"].count == 0

            def keep(path: Path, old: Array, new: Array) -> Array:
                # Counters, which are whole numbers, advance with an empty micro-batch too, or
                # replicas would count different numbers of steps.
                is_own = self.model.keeps_own(path, new) and is_float(new)
                return jnp.where(is_empty, old, new) if is_own else new

            model_state = jax.tree_util.tree_map_with_path(keep, before, model_state)

        # Decides leaf by leaf: one decision over all gradients would hold back the first bucket
        # until the last gradient is finished.
        def finish(grad: Array) -> Array:
            return grad if is_empty is None else jnp.where(is_empty, 0, grad)

        def backward(scale: Array) -> Grads:
            # The cotangent has the dtype of the loss, which may be float64.
            (grads,) = pullback((scale * start).astype(loss.dtype))
            return grads

        return Linearized(backward, finish, sums, model_state)

    def units(self, params: Params, sums: Sums, loss_scale: Scale) -> Units:
        """Factors of the gradients, for parameters and sums of these forms."""
        num_entries = sums["loss"].num_entries * self.num
        return Units(self.start(params, num_entries), loss_scale, num_entries)

    def start(self, params: Params, num_entries: int) -> float:
        """Returns the power of two that the backward pass starts from; 1 where it is not needed.

        A gradient summed over all entries of a replica overflows float16. Times this, it is no more
        than the gradient of their mean, and that is what a loss scale scales.
        """
        is_half = any(x.dtype == jnp.float16 for x in jax.tree.leaves(params))
        return power_of_two_within(1 / num_entries) if self.is_scaled or is_half else 1.0

    def split(self, inputs: Inputs, key: Array) -> Callable[[Number], MicroBatch]:
        """Returns a function of a number that returns the micro-batch."""
        if self.num == 1:
            return lambda i: (inputs.rows, key, inputs.constants)
        # Each micro-batch has its own key, or dropout would drop the same units in all of them.
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(self.num))
        rows = split_rows(inputs.rows, self.num)

        def take(i: Number) -> MicroBatch:
            # Indexed, and not given to the scan to iterate over: with overlap the last micro-batch
            # is taken outside of it.
            part = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
            return *jax.tree.map(part, (rows, keys)), inputs.constants

        return take

    def before(self, state: TrainState, carried: ModelState) -> ModelState:
        """Returns the other state from which the next micro-batch runs."""

        def choose(path: Path, first: Array, x: Array) -> Array:
            return first if self.model.is_global_statistic(path, x) else x

        return jax.tree_util.tree_map_with_path(choose, state.model_state, carried)

    def after(self, state: TrainState, carried: ModelState, new: ModelState) -> ModelState:
        """Returns the other state to carry on, with the state after a micro-batch."""

        def add(path: Path, first: Array, total: Array, x: Array) -> Array:
            # Each micro-batch has counted the same update: counts are not added.
            is_moved = self.model.is_global_statistic(path, x) and is_float(x) and self.num > 1
            return total + (x - first) / self.num if is_moved else x

        return jax.tree_util.tree_map_with_path(add, state.model_state, carried, new)

    def accumulate(
        self, state: TrainState, take: Callable[[Number], MicroBatch], num: int, scale: Scale
    ) -> Accumulated:
        """Sums over the first micro-batches, in their order."""

        def one(carried: ModelState, i: Number) -> Accumulated:
            run = self.linearize(state, self.before(state, carried), take(i))
            grads = jax.tree.map(run.finish, run.backward(jnp.float32(scale)))
            return Accumulated(grads, self.after(state, carried, run.model_state), run.sums)

        def add(total: Accumulated, i: Array) -> tuple[Accumulated, Sums]:
            more = one(total.model_state, i)
            # Added in float32: in half precision a micro-batch's gradient is rounded away once the
            # sum of the earlier ones is a few hundred times larger.
            grads = jax.tree.map(lambda x, g: x + g.astype(x.dtype), total.grads, more.grads)
            return Accumulated(grads, more.model_state, {}), more.sums

        if num == 0:
            return Accumulated(None, state.model_state, {})
        if num == 1:  # A scan of one iteration would add all gradients to zeros.
            return one(state.model_state, 0)
        # A scan, and not an unrolled loop: the program holds the model once, and one micro-batch's
        # activations are in memory at a time.
        zeros = jax.tree.map(jnp.zeros_like, widened(state.params))
        first = Accumulated(zeros, state.model_state, {})
        total, sums = jax.lax.scan(add, first, jnp.arange(num))
        return total._replace(sums=jax.tree.map(lambda x: x.sum(0), sums))
