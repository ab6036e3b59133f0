"""The optimizer's update on one replica.

    PlacedOptimizer    all parameters, or the replica's parts of them where they are divided
    Zero1              of a shard of each array: ZeRO, stage 1

With `Zero1` each replica has its shard of every gradient, keeps the optimizer's state only for its
shard of every parameter, updates that, and gathers the other shards. That gives the numbers of the
whole update if the optimizer is separable, which is read from its traced program. Parameters that
another optimizer needs whole, such as the matrices of Muon, have owners that update them, where
parameters are divided too. An optimizer in which parameters depend on each other is refused.

References:
  Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020.
  https://arxiv.org/abs/2004.13336. Rajbhandari et al., "ZeRO", 2020, stage 1.
  https://arxiv.org/abs/1910.02054.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from jddp.engine.protocols import OPTIMIZER, Optimizer, Placement, Unused, View
from jddp.engine.separable import DividedUpdate, Inseparable, at_least_1d, divided_update, update
from jddp.engine.state import Replicated, Sharded, TrainState, parts_in
from jddp.engine.unused import UNUSED
from jddp.engine.view import own_shards
from jddp.errors import ConfigError, check_choice
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import Reducer
from jddp.reduce.shards import Division, Flat
from jddp.typing import Grads, Leaf, OptState, Params, PyTree

UpdateRule = Callable[[Grads, OptState, Params, Array], tuple[Grads, OptState]]


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

    def init(self, params: Params, shapes: Params) -> OptState:
        """Returns the state for the replica's parameters, or its parts of them."""
        divided = divided_update(self.tx, shapes, self.placement.division)
        if divided is None:
            return own_copy(self.tx.init(params))
        # XLA gathers nothing for a state that depends on shapes alone.
        return own_copy(divided.init(self.tx, divided.whole(params)))

    def layouts(self, params: Params) -> PyTree:
        """Returns the layouts of parameters of the same shapes."""
        opt_state = jax.eval_shape(self.tx.init, params)
        layouts = jax.tree.map(lambda x: self.placement.layout(x.shape), opt_state)
        return _with_shared(layouts, divided_update(self.tx, params, self.placement.division))

    def check(self, params: Params) -> None:
        """Refuses an optimizer that accumulates, or for parts of parameters cannot be divided.

        Raises:
          ConfigError: If it is one.
        """
        refuse_unusable(self.tx, params, self.num_micro_batches, self.placement.division)

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Updates the replica's parameters, or its parts of them."""
        shapes = jax.eval_shape(lambda x: view.whole(x, lambda x: x), state.params)
        divided = divided_update(self.tx, shapes, self.placement.division)
        rule = divided or functools.partial(update, self.tx)
        after = updated(rule, grads, state.opt_state, state.params, value)
        # After the update, since weight decay and momentum move a parameter also with a gradient of
        # 0.
        return self.unused(after, (state.params, state.opt_state), after[0], plan)


@final
@dataclass(frozen=True)
class Zero1:
    """Each replica updates its shard of each parameter.

    Attributes:
      tx: An optax optimizer that can be divided.
      unused: Treatment of parameters that no gradient reaches.
      num_micro_batches: Number of micro-batches of a step.
      reducer: Reducer of the gradients, by whose buckets shards of parameters are gathered.
      division: Division of the parameters into shards.
    """

    tx: optax.GradientTransformation
    unused: Unused
    num_micro_batches: int
    reducer: Reducer
    division: Flat

    def init(self, params: Params, shapes: Params) -> OptState:
        """Returns the state for the replica's shards of all parameters."""
        divided = divided_update(self.tx, shapes, self.division)
        if divided is None:
            return own_copy(self.tx.init(own_shards(params, self.reducer.axis)))
        return own_copy(divided.init(self.tx, params))

    def layouts(self, params: Params) -> PyTree:
        """Returns sharded layouts."""
        opt_state = jax.eval_shape(self.tx.init, at_least_1d(params))
        # Scalars, such as a count of steps, are the same for every shard.
        layouts = jax.tree.map(lambda x: Sharded(x.shape) if x.shape else Replicated(), opt_state)
        return _with_shared(layouts, divided_update(self.tx, params, self.division))

    def check(self, params: Params) -> None:
        """Refuses an optimizer that accumulates, or that cannot be divided.

        Raises:
          ConfigError: If it is one, with the operation by which parameters depend on others.
        """
        refuse_unusable(self.tx, params, self.num_micro_batches, self.division)

    def update(
        self, grads: Grads, state: TrainState, plan: BucketPlan, view: View, value: Array
    ) -> tuple[Params, OptState]:
        """Updates a shard of each parameter, and gathers the shards of all replicas."""
        before = own_shards(state.params, view.axis)
        divided = divided_update(self.tx, state.params, self.division)
        rule = divided or functools.partial(update, self.tx)
        own, opt_state = updated(rule, view.shards(grads), state.opt_state, before, value)
        # At the end of the step, not before the next: `state.params` is always complete, to be
        # evaluated, saved and compared.
        params = self.reducer.gather(own, state.params, plan)
        after, before = (params, opt_state), (state.params, state.opt_state)
        return self.unused(after, before, params, plan)


def _with_shared(layouts: PyTree, divided: DividedUpdate | None) -> PyTree:
    """The layouts of a state; arrays that all parameters share are the same on every replica."""
    if divided is None:
        return layouts
    shared = divided.shared(layouts)
    return jax.tree.map(lambda x, shared: Replicated() if shared else x, layouts, shared)


def updated(
    rule: UpdateRule, grads: Grads, opt_state: OptState, params: Params, value: Array
) -> tuple[Params, OptState]:
    """Returns parameters and optimizer state after an update."""
    with jax.named_scope(OPTIMIZER):
        updates, opt_state = rule(grads, opt_state, params, value)
        return optax.apply_updates(params, updates), opt_state


def trace_whole(
    tx: optax.GradientTransformation, params: Params
) -> tuple[ClosedJaxpr, tuple[Params, OptState]]:
    """Traces the update of whole parameters, of these shapes; returns those of its results too."""
    opt_state = jax.eval_shape(tx.init, params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    rule = functools.partial(updated, functools.partial(update, tx))
    return jax.make_jaxpr(rule, return_shape=True)(params, opt_state, params, loss)


def own_copy(opt_state: OptState) -> OptState:
    """Copies a first state: it may keep the parameters, and each leaf needs its own buffer."""
    return jax.tree.map(jnp.copy, opt_state)


def refuse_unusable(
    tx: optax.GradientTransformation,
    params: Params,
    num_micro_batches: int,
    division: Division | None,
) -> None:
    """Refuses an optimizer that accumulates, asks for more than a step has, or cannot be divided.

    Raises:
      ConfigError: If it is one.
    """
    # Only the state for the parameters themselves shows it: an optimizer may name them.
    opt_state = jax.eval_shape(tx.init, params)
    if parts_in(opt_state, optax.LookaheadState):
        raise ConfigError(
            "optax.lookahead updates pairs of fast and slow parameters, and a model has one of "
            "each. Give its fast optimizer, with strategy=jddp.LocalSteps(sync_period, "
            "optax.sgd(slow_step_size)), which is the same on one device; or ema_decay=."
        )
    if num_micro_batches > 1 and parts_in(opt_state, optax.MultiStepsState):
        raise ConfigError(
            "optax.MultiSteps beside accumulate_steps would reduce once per micro-batch and "
            "count steps twice. Drop optax.MultiSteps: accumulate_steps reduces once for all."
        )
    try:
        jax.tree.map(lambda *_: None, opt_state, trace_whole(tx, params)[1][1])
        divided_update(tx, params, division)
    except Inseparable as reason:
        raise ConfigError(
            "strategy='zero1' and 'fsdp' divide parameters over the replicas, and this optimizer "
            f"does not update each by itself: it {reason}. Choose strategy='ddp'; or in the place "
            "of clipping max_grad_norm=, of apply_if_finite skip_nonfinite=True, and of "
            "optax.MultiSteps accumulate_steps=."
        ) from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            "optimizer cannot be used in a step, which has gradients, a state of one structure, "
            f"parameters and value=, the loss: {str(error).splitlines()[0]} Choose one without "
            "line search, functions of the loss or gradients of rows; or write the loop, and "
            "average gradients with jddp.average_gradients."
        ) from error


def own_count(opt_state: OptState) -> Leaf | None:
    """The updates so far of an optimizer that leaves out steps by itself; None of another."""
    leaves_out = parts_in(opt_state, optax.MultiStepsState, optax.ApplyIfFiniteState)
    counts = [x.count for x in parts_in(leaves_out, optax.ScaleByScheduleState)]
    counts += [x.gradient_step for x in parts_in(leaves_out, optax.MultiStepsState)]
    return counts[0] if counts else None


def choose_optimizer(
    tx: optax.GradientTransformation,
    unused_parameters: str,
    num_micro_batches: int,
    placement: Placement,
    num_replicas: int,
    sharded_by: Reducer | None = None,
) -> Optimizer:
    """Returns the update of an optax optimizer.

    Args:
      tx: The optimizer.
      unused_parameters: "zero", "skip" or "error".
      num_micro_batches: Number of micro-batches of a step.
      placement: Placement of the parameters.
      num_replicas: Number of replicas.
      sharded_by: Reducer of the gradients, where each replica updates its shard; else None.

    Raises:
      ConfigError: If it is no optax optimizer.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigError(
            f"optimizer is of type {type(tx).__name__}. Give an optax optimizer: "
            "optax.adam(1e-3), not optax.adam; of an nnx.Optimizer its .tx."
        )
    # Of functions, and so a key of caches, whatever it was.
    tx = optax.with_extra_args_support(tx)
    check_choice("unused_parameters", unused_parameters, UNUSED)
    unused = UNUSED[unused_parameters]()
    if sharded_by is None:
        return PlacedOptimizer(tx, unused, num_micro_batches, placement)
    division = Flat(sharded_by.axis, num_replicas)
    return Zero1(tx, unused, num_micro_batches, sharded_by, division)
