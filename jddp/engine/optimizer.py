"""The optimizer's update on one replica.

    PlacedOptimizer    all parameters, or the replica's parts of them where they are divided
    Zero1              of a shard of each array: ZeRO, stage 1

With `Zero1` each replica has its shard of every gradient, keeps the optimizer's state only for its
shard of every parameter, updates that, and gathers the other shards. That gives the numbers of the
whole update if the optimizer is separable, which is read from its traced program; any other
optimizer is refused.

References:
  Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020.
  https://arxiv.org/abs/2004.13336. Rajbhandari et al., "ZeRO", 2020, stage 1.
  https://arxiv.org/abs/1910.02054.
"""

import functools
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jddp.engine.protocols import OPTIMIZER, Optimizer, Placement, Unused, View
from jddp.engine.separable import at_least_1d, why_not_split
from jddp.engine.state import Replicated, Sharded, TrainState
from jddp.engine.unused import UNUSED
from jddp.engine.view import own_shards
from jddp.errors import ConfigError, check_choice
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import Reducer
from jddp.reduce.shards import shard_shape
from jddp.typing import Grads, OptState, Params, PyTree


@final
@dataclass(frozen=True)
class PlacedOptimizer:
    """Each replica updates its part of each parameter, which may be all of it.

    Attributes:
      tx: Any optax optimizer.
      unused: Treatment of parameters that no gradient reaches.
      num_micro_batches: Number of micro-batches of a step.
      placement: Placement of the parameters.
    """

    tx: optax.GradientTransformation
    unused: Unused
    num_micro_batches: int
    placement: Placement

    def init(self, params: Params) -> OptState:
        """Returns the state for the replica's parameters, or its parts of them."""
        return own_copy(self.tx.init(params))

    def layouts(self, params: Params) -> PyTree:
        """Returns the layouts of parameters of the same shapes."""
        opt_state = jax.eval_shape(self.tx.init, params)
        return jax.tree.map(lambda x: self.placement.layout(x.shape), opt_state)

    def check(self, params: Params, num_replicas: int) -> None:
        """Refuses an optimizer that accumulates, or for parts of parameters is not separable.

        Raises:
          ConfigError: If it is one.
        """
        refuse_multi_steps(self.tx, params, self.num_micro_batches)
        if self.placement.part_shape is not None:
            reason = why_not_split(self.tx, params, self.placement.part_shape)
            _refuse_inseparable("fsdp", reason)

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Updates the replica's parameters, or its parts of them."""
        after = updated(self.tx, grads, state.opt_state, state.params, value)
        # After the update, since weight decay and momentum move a parameter also with a gradient of
        # 0.
        return self.unused(after, (state.params, state.opt_state), after[0], plan)


@final
@dataclass(frozen=True)
class Zero1:
    """Each replica updates its shard of each parameter.

    Attributes:
      tx: A separable optax optimizer.
      unused: Treatment of parameters that no gradient reaches.
      num_micro_batches: Number of micro-batches of a step.
      reducer: Reducer of the gradients, by whose buckets shards of parameters are gathered.
    """

    tx: optax.GradientTransformation
    unused: Unused
    num_micro_batches: int
    reducer: Reducer

    def init(self, params: Params) -> OptState:
        """Returns the state for the replica's shards of all parameters."""
        return own_copy(self.tx.init(own_shards(params, self.reducer.axis)))

    def layouts(self, params: Params) -> PyTree:
        """Returns sharded layouts."""
        opt_state = jax.eval_shape(self.tx.init, at_least_1d(params))
        # Scalars, such as a count of steps, are the same for every shard.
        return jax.tree.map(lambda x: Sharded(x.shape) if x.shape else Replicated(), opt_state)

    def check(self, params: Params, num_replicas: int) -> None:
        """Refuses an optimizer that accumulates, or that is not separable.

        Raises:
          ConfigError: If it is one, with the operation by which elements depend on others.
        """
        refuse_multi_steps(self.tx, params, self.num_micro_batches)
        part_shape = functools.partial(shard_shape, num_shards=num_replicas)
        _refuse_inseparable("zero1", why_not_split(self.tx, params, part_shape))

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Updates a shard of each parameter, and gathers the shards of all replicas."""
        before = own_shards(state.params, view.axis)
        own, opt_state = updated(self.tx, view.shards(grads), state.opt_state, before, value)
        # At the end of the step, not before the next: `state.params` is always complete, to be
        # evaluated, saved and compared.
        params = self.reducer.gather(own, state.params, plan)
        after, before = (params, opt_state), (state.params, state.opt_state)
        return self.unused(after, before, params, plan)


def _refuse_inseparable(strategy: str, reason: str) -> None:
    if reason:
        raise ConfigError(
            f"strategy={strategy!r} gives each replica a shard of each array, and this optimizer "
            f"does not work element by element: it {reason}. Choose strategy='ddp'; or, "
            "if it is clipping, max_grad_norm= in its place, and for apply_if_finite "
            "skip_nonfinite=True."
        )


def updated(
    tx: optax.GradientTransformation,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    value: Array,
) -> tuple[Params, OptState]:
    """Returns parameters and optimizer state after an update by an optax optimizer."""
    # Some optimizers, such as `reduce_on_plateau`, ask for the loss: it is global, so that all
    # replicas decide the same.
    tx = optax.with_extra_args_support(tx)
    with jax.named_scope(OPTIMIZER):
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state


def own_copy(opt_state: OptState) -> OptState:
    """Copies a first state: it may keep the parameters, and each leaf needs its own buffer."""
    return jax.tree.map(jnp.copy, opt_state)


def refuse_multi_steps(
    tx: optax.GradientTransformation, params: Params, num_micro_batches: int
) -> None:
    """Refuses `optax.MultiSteps` beside micro-batches.

    Raises:
      ConfigError: If there are both.
    """
    # Only the state for the parameters themselves shows it: an optimizer may name them.
    if num_micro_batches > 1 and _is_multi_steps(jax.eval_shape(tx.init, params)):
        raise ConfigError(
            "optax.MultiSteps beside accumulate_steps would reduce once per micro-batch and "
            "count steps twice. Drop optax.MultiSteps: accumulate_steps reduces once for all."
        )


def choose_optimizer(
    tx: optax.GradientTransformation,
    unused_parameters: str,
    num_micro_batches: int,
    placement: Placement,
    sharded_by: Reducer | None = None,
) -> Optimizer:
    """Returns the update of an optax optimizer.

    Args:
      tx: The optimizer.
      unused_parameters: "zero", "skip" or "error".
      num_micro_batches: Number of micro-batches of a step.
      placement: Placement of the parameters.
      sharded_by: Reducer of the gradients, where each replica updates its shard; else None.

    Raises:
      ConfigError: If it is no optax optimizer.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigError(
            f"optimizer is of type {type(tx).__name__}. Give an optax optimizer: "
            "optax.adam(1e-3), not optax.adam; of an nnx.Optimizer its .tx."
        )
    check_choice("unused_parameters", unused_parameters, UNUSED)
    unused = UNUSED[unused_parameters]()
    if sharded_by is None:
        return PlacedOptimizer(tx, unused, num_micro_batches, placement)
    return Zero1(tx, unused, num_micro_batches, sharded_by)


def _is_multi_steps(opt_state: OptState) -> bool:
    """Whether `optax.MultiSteps` is anywhere in an optimizer, by the type of its state."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    return any(isinstance(state, optax.MultiStepsState) for state in states)
