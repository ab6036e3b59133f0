"""The optimizer's update on one replica.

    ReplicatedOptimizer    of the whole parameters
    Zero1                  of a shard of each array: ZeRO, stage 1

With `Zero1` each replica has its shard of every gradient, keeps the optimizer's state only for its
shard of every parameter, updates that, and gathers the other shards. That gives the numbers of the
whole update if the optimizer is separable, which is read from its traced program; any other
optimizer is refused.

References:
  Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020.
  https://arxiv.org/abs/2004.13336. Rajbhandari et al., "ZeRO", 2020, stage 1.
  https://arxiv.org/abs/1910.02054.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jddp.engine.separable import at_least_1d, why_not_split
from jddp.engine.state import Replicated, Sharded, TrainState
from jddp.engine.unused import UNUSED, Zero
from jddp.engine.view import View
from jddp.errors import ConfigError, check_choice
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reduction import Reduction
from jddp.typing import Grads, OptState, Params, PyTree

OPTIMIZER = "optimizer_update"  # the scope of the equations of an optimizer


@dataclass(frozen=True)
class ReplicatedOptimizer:
    """Each replica updates all parameters.

    Attributes:
      tx: Any optax optimizer.
      unused: Treatment of parameters that no gradient reaches.
      num_micro_batches: Number of micro-batches of a step.
    """

    tx: optax.GradientTransformation
    unused: Zero
    num_micro_batches: int

    def init(self, params: Params) -> OptState:
        """Returns the first state, on one replica."""
        # It may keep the parameters themselves: each leaf needs a buffer of its own.
        return jax.tree.map(jnp.copy, self.tx.init(params))

    def layouts(self, params: Params) -> PyTree:
        """Returns the `Layout` of each leaf of the state, for parameters of these shapes."""
        return jax.tree.map(lambda _: Replicated(), jax.eval_shape(self.tx.init, params))

    def check(self, params: Params, num_replicas: int) -> None:
        """Refuses an optimizer that the step cannot use.

        Raises:
          ConfigError: If it accumulates gradients beside micro-batches.
        """
        # Only the state for the parameters themselves shows it: an optimizer may name them.
        if self.num_micro_batches > 1 and _is_multi_steps(jax.eval_shape(self.tx.init, params)):
            raise ConfigError(
                "optax.MultiSteps beside accumulate_steps would reduce once per micro-batch and "
                "count steps twice. Drop optax.MultiSteps: accumulate_steps reduces once for all."
            )

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Returns one replica's new parameters and optimizer state.

        Args:
          grads: The averaged gradients, or the replica's shards of them, by `view`.
          state: State before the step, of one replica.
          plan: The buckets.
          view: View of the replica on the mean gradient.
          value: Loss of the step, for optimizers that ask for it.
        """
        before, grads = self._own(state.params, View(view.axis)), self._own(grads, view)
        # Some optimizers, such as `reduce_on_plateau`, ask for the loss: it is global, so that all
        # replicas decide the same.
        tx = optax.with_extra_args_support(self.tx)
        with jax.named_scope(OPTIMIZER):
            updates, opt_state = tx.update(grads, state.opt_state, before, value=value)
            own = optax.apply_updates(before, updates)
        params = self._whole(own, state.params, plan)
        # After the update, since weight decay and momentum move a parameter also with a gradient of
        # 0.
        after, before = (params, opt_state), (state.params, state.opt_state)
        return self.unused(after, before, params, plan)

    def _own(self, tree: PyTree, view: View) -> PyTree:
        """The part of parameters or gradients, seen by `view`, that this replica updates."""
        return tree

    def _whole(self, own: Params, before: Params, plan: BucketPlan) -> Params:
        """The whole parameters, from those that each replica has updated."""
        return own


@dataclass(frozen=True)
class Zero1(ReplicatedOptimizer):
    """Each replica updates its shard of each parameter.

    Attributes:
      reduction: Reduction of the gradients, by whose buckets shards of parameters are gathered.
    """

    reduction: Reduction

    def init(self, params: Params) -> OptState:
        """As `ReplicatedOptimizer.init`, of a shard."""
        return super().init(self._own(params, View(self.reduction.axis)))

    def layouts(self, params: Params) -> PyTree:
        """As `ReplicatedOptimizer.layouts`."""
        opt_state = jax.eval_shape(self.tx.init, at_least_1d(params))
        # Scalars, such as a count of steps, are the same for every shard.
        return jax.tree.map(lambda x: Sharded(x.shape) if x.shape else Replicated(), opt_state)

    def check(self, params: Params, num_replicas: int) -> None:
        """As `ReplicatedOptimizer.check`.

        Raises:
          ConfigError: Also if elements of the update depend on others, with the operation.
        """
        super().check(params, num_replicas)
        if reason := why_not_split(self.tx, params, num_replicas):
            raise ConfigError(
                "shard_optimizer=True gives each replica a shard of each array, and this optimizer "
                f"does not work element by element: it {reason}. Choose shard_optimizer=False; or, "
                "if it is clipping, max_grad_norm= in its place, and for apply_if_finite "
                "skip_nonfinite=True."
            )

    def _own(self, tree: PyTree, view: View) -> PyTree:
        return view.shards(tree)

    def _whole(self, own: Params, before: Params, plan: BucketPlan) -> Params:
        # At the end of the step, not before the next: `state.params` is always complete, to be
        # evaluated, saved and compared.
        return self.reduction.gather(own, before, plan)


def choose_optimizer(
    tx: optax.GradientTransformation,
    unused_parameters: str,
    sharded_by: Reduction | None,
    num_micro_batches: int,
) -> ReplicatedOptimizer:
    """Returns the update of an optax optimizer.

    Args:
      tx: The optimizer.
      unused_parameters: "zero", "skip" or "error".
      sharded_by: Reduction of the gradients, where each replica updates its shard; else None.
      num_micro_batches: Number of micro-batches of a step.

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
        return ReplicatedOptimizer(tx, unused, num_micro_batches)
    return Zero1(tx, unused, num_micro_batches, sharded_by)


def _is_multi_steps(opt_state: OptState) -> bool:
    """Whether `optax.MultiSteps` is anywhere in an optimizer, by the type of its state."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    return any(isinstance(state, optax.MultiStepsState) for state in states)
