"""The optimizer's update on one replica: of the whole parameters, or of its part of each.

With `shard_optimizer` each replica has its part of every gradient, keeps the optimizer's state for
its part of every parameter alone, updates that, and gets the others' parts from them. That gives
the numbers of the whole update if the optimizer works element by element, which is read from its
traced program; one that does not is refused.

References:
  Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", 2020.
  https://arxiv.org/abs/2004.13336. Rajbhandari et al., "ZeRO", 2020, stage 1.
  https://arxiv.org/abs/1910.02054.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jddp.engine.separable import find_mixing, is_same
from jddp.engine.spec import Recipe
from jddp.engine.state import Replicated, Sharded, TrainState
from jddp.engine.unused import take_back
from jddp.errors import ConfigError
from jddp.reduce import BucketPlan, own_part, part_shape
from jddp.typing import Grads, OptState, Params, PyTree


def update(
    recipe: Recipe, plan: BucketPlan, grads: Grads, state: TrainState, loss: Array
) -> tuple[Params, OptState]:
    """Returns one replica's new parameters and optimizer's state.

    Args:
      recipe: What the step is made of.
      plan: The buckets.
      grads: Averaged; this replica's parts of them, where the reduction keeps parts.
      state: Of one replica.
      loss: Of the step, for optimizers that ask for its `value`.
    """
    before = state.params
    if recipe.shard_optimizer:
        before = _own_parts(recipe, before)
        grads = grads if recipe.reduction.keeps_parts else _own_parts(recipe, grads)
    optimizer = optax.with_extra_args_support(recipe.optimizer)
    updates, opt_state = optimizer.update(grads, state.opt_state, before, value=loss)
    params = optax.apply_updates(before, updates)
    if recipe.shard_optimizer:
        params = recipe.reduction.gather(params, state.params, plan=plan)
    if recipe.unused_parameters == "skip" and plan.unused:
        return take_back((params, opt_state), (state.params, state.opt_state), params, plan.unused)
    return params, opt_state


def init_optimizer(recipe: Recipe, params: Params) -> OptState:
    """The optimizer's first state, on one replica."""
    params = _own_parts(recipe, params) if recipe.shard_optimizer else params
    # It may keep the parameters themselves: each leaf needs a buffer of its own.
    return jax.tree.map(jnp.copy, recipe.optimizer.init(params))


def optimizer_layouts(recipe: Recipe, params: Params) -> PyTree:
    """How each leaf of the optimizer's state lies on the mesh, for parameters of these shapes."""
    if not recipe.shard_optimizer:
        opt_state = jax.eval_shape(recipe.optimizer.init, params)
        return jax.tree.map(lambda _: Replicated(), opt_state)
    opt_state = jax.eval_shape(recipe.optimizer.init, _reshaped(params, _at_least_1d))
    return jax.tree.map(lambda x: Sharded(x.shape) if x.shape else Replicated(), opt_state)


def check_optimizer(recipe: Recipe, params: Params, num_replicas: int) -> None:
    """Refuses to split an optimizer that does not work element by element.

    Raises:
      ConfigError: Which says what it does.
    """
    if not recipe.shard_optimizer:
        return
    part = functools.partial(part_shape, num_parts=num_replicas)
    shapes = (_reshaped(params, shape) for shape in (_at_least_1d, part))
    if reason := _why_not_split(recipe.optimizer, *shapes):
        raise ConfigError(
            "shard_optimizer=True gives each replica a part of every array, and this optimizer "
            f"does not work element by element: it {reason}. Choose shard_optimizer=False; or, if "
            "it is clipping, max_grad_norm= in its place, and for apply_if_finite "
            "skip_nonfinite=True."
        )


def _reshaped(params: Params, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Params:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x.shape), x.dtype), params)


def _at_least_1d(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape or (1,)


def _why_not_split(optimizer: optax.GradientTransformation, whole: Params, part: Params) -> str:
    """What keeps an optimizer of such parameters from being split; "" if nothing does."""
    extended = optax.with_extra_args_support(optimizer)

    def step(params: Params, loss: Array, opt_state: OptState) -> PyTree:
        return extended.update(params, opt_state, params, value=loss)

    loss = jax.ShapeDtypeStruct((), jnp.float32)
    opt_state = jax.eval_shape(optimizer.init, whole)
    known = {x.shape for x in jax.tree.leaves(whole)}
    strange = [x.shape for x in jax.tree.leaves(opt_state) if x.shape and x.shape not in known]
    if strange:
        return f"keeps an array of shape {strange[0]}, which no parameter has"
    mixing = find_mixing(optimizer.init, whole) or find_mixing(step, whole, loss, opt_state)
    if mixing:
        return f"applies {mixing!r} to arrays as a whole"
    of_part = jax.eval_shape(optimizer.init, part)
    if is_same(optimizer.init, (whole,), (part,)) and is_same(
        step, (whole, loss, opt_state), (part, loss, of_part)
    ):
        return ""
    return "does something else with arrays of other shapes"


def _own_parts(recipe: Recipe, tree: PyTree) -> PyTree:
    return jax.tree.map(functools.partial(own_part, axis=recipe.axis), tree)
