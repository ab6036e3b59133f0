"""Replicas that go their own ways and meet now and then: DiLoCo, post-local SGD, averaging.

    steps 1 to H    each replica alone: its rows, its gradient, its optimizer
    after step H    outer parameters - own ─► bucketed mean ─► outer optimizer ─► new for all

A step of the outer optimizer takes the mean difference for a gradient. With SGD of rate 1 it gives
the mean of the parameters; with Nesterov momentum it is DiLoCo's.

This room knows when replicas meet and what they do there, and nothing of models or losses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from jddp.engine.state import TrainState
from jddp.errors import ConfigError
from jddp.reduce import Reduction
from jddp.reduce.gradients import Finished, Gradients
from jddp.typing import Grads, HookState, ModelState, OptState, Params, PyTree

Average = Callable[[Gradients, HookState], tuple[Grads, HookState]]
MEAN = optax.sgd(1.0)


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """Steps that each replica takes alone, between meetings at which parameters travel.

        jddp.LocalSteps(every=16)                                              # their mean
        jddp.LocalSteps(every=16, start=1000)                                  # post-local SGD
        jddp.LocalSteps(16, optax.sgd(0.7, momentum=0.9, nesterov=True))       # DiLoCo

    Attributes:
      every: Steps from one meeting to the next.
      outer: Takes the mean of (parameters after the last meeting - own) for a gradient of those
        parameters. By default SGD of rate 1, which gives the mean of the replicas' parameters.
      start: As many first steps are plain ones, with gradients averaged in each.

    Steps that `skip_nonfinite` leaves out are not counted.

    Raises:
      ConfigError: If a number breaks its rule.

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
      algorithm 1. https://arxiv.org/abs/2311.08105. Lin et al., "Don't Use Large Mini-Batches, Use
      Local SGD", 2018. https://arxiv.org/abs/1808.07217. Stich, "Local SGD Converges Fast and
      Communicates Little", 2018. https://arxiv.org/abs/1805.09767.
    """

    every: int
    outer: optax.GradientTransformation = MEAN
    start: int = 0

    def __post_init__(self) -> None:
        """Holds the numbers to their rules."""
        if self.every < 1 or self.start < 0:
            raise ConfigError(
                "local_steps: every is at least 1 and start at least 0; got "
                f"every={self.every}, start={self.start}."
            )

    def init(self, params: Params) -> PyTree:
        """What replicas have in common: the outer parameters, and the outer optimizer's state."""
        return {"params": params, "opt_state": self.outer.init(params)}

    def while_shared(self, average: Average, state: TrainState) -> Average:
        """`average(grads, memory)` in the steps before `start`; later both are left as they are."""

        def leave(grads: Gradients, memory: HookState) -> tuple[Grads, HookState]:
            return grads.tree(), memory

        def choose(*given: Any) -> Any:
            return lax.cond(self._is_shared(state), lambda: average(*given), lambda: leave(*given))

        return choose if self.start else leave

    def divisor(self, state: TrainState, own: Array, mean: Array) -> Array:
        """What a replica's sum of gradients is divided by: its own count, or the mean of all."""
        return jnp.where(self._is_shared(state), mean, own)

    def wait(self, state: TrainState, own: Array, params: Params, opt_state: OptState) -> Any:
        """Leaves a replica alone that has no valid entry to learn from; but it counts the step."""
        moves = self._is_shared(state) | (own > 0)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(moves, new, old) if jnp.issubdtype(new.dtype, jnp.inexact) else new

        return jax.tree.map(choose, (params, opt_state), (state.params, state.opt_state))

    def _is_shared(self, state: TrainState) -> Array:
        return state.step - state.skipped < self.start

    def meet(self, reduction: Reduction, state: TrainState, params: Params) -> tuple[Params, Any]:
        """Moves all replicas to one place, if they meet after this step.

        Args:
          reduction: How the differences travel.
          state: Of one replica, before the step.
          params: Its parameters after the step.

        Returns:
          Its parameters, and what replicas have in common.
        """

        def apart(params: Params, outer: PyTree) -> tuple[Params, PyTree]:
            return params, outer

        def together(params: Params, outer: PyTree) -> tuple[Params, PyTree]:
            start = outer["params"]
            with jax.named_scope("meeting"):
                moved = jax.tree.map(jnp.subtract, start, params)
                # Of all parameters, also of those that these rows do not use.
                mean, _ = reduction(Finished(moved), (), plan=reduction.plan(params))
            updates, opt_state = self.outer.update(mean, outer["opt_state"], start)
            params = optax.apply_updates(start, updates)
            return params, {"params": params, "opt_state": opt_state}

        def as_one(params: Params, outer: PyTree) -> tuple[Params, PyTree]:
            return params, {**outer, "params": params}

        taken = state.step - state.skipped + 1
        is_due = ((taken - self.start) % self.every == 0).astype(jnp.int32)
        branches = [apart, together, as_one] if self.start else [apart, together]
        chosen = jnp.where(taken <= self.start, 2, is_due)
        met: tuple[Params, PyTree] = lax.switch(chosen, branches, params, state.comm_state.outer)
        return met


def check_own(model_state: ModelState, keeps_own: Callable[[Any, Any], bool]) -> None:
    """Refuses other state that replicas would have to agree on between meetings.

    Raises:
      ConfigError: If there is a floating leaf of which not each replica has its own.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(model_state):
        if jnp.issubdtype(x.dtype, jnp.inexact) and not keeps_own(path, x):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ConfigError(
                f"local_steps: replicas would have to agree on {name!r} in each step, and between "
                "meetings nothing is to travel. Choose batch_norm='local', or name its collection "
                "in per_replica=: each replica then has its own, and their mean is evaluated."
            )
