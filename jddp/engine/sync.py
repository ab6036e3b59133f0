"""Replicas that synchronize after several local steps.

    steps 1 to H    each replica alone: its rows, its gradient, its optimizer
    after step H    outer parameters - own ─► bucketed mean ─► outer optimizer ─► all

An outer step (`MeanDifference`) takes the mean difference for a gradient. With SGD of rate 1 it
gives the mean of the parameters; with Nesterov momentum it is the outer step of DiLoCo.

This room knows when replicas synchronize and what they send, and nothing of models or losses.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from jddp.engine.micro_batches import Local
from jddp.engine.optimizer import OPTIMIZER
from jddp.engine.spec import Averaged, Synchronization
from jddp.engine.state import KeepsOwn, TrainState, is_float, name_of, own_layouts
from jddp.engine.view import View
from jddp.ground.errors import ConfigError
from jddp.ground.typing import ModelState, Params, Path, PyTree
from jddp.reduce.backward import Finished
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import Reducer

MEAN = optax.sgd(1.0)


@runtime_checkable
class OuterStep(Protocol):
    """How replicas agree on parameters after local steps; a part of `jddp.LocalSteps`."""

    def init(self, params: Params) -> dict[str, PyTree]:
        """Returns the first shared state: a dict with "params", the parameters of all replicas."""

    def __call__(
        self, reducer: Reducer, params: Params, outer: dict[str, PyTree]
    ) -> tuple[Params, dict[str, PyTree]]:
        """Returns the replica's parameters after the outer step, and the shared state.

        Args:
          reducer: Reducer of differences of parameters.
          params: Parameters of this replica.
          outer: Shared state since the last outer step.
        """


@final
@dataclasses.dataclass(frozen=True)
class MeanDifference:
    """An outer step with the mean difference for a gradient.

    Attributes:
      tx: Optimizer of the outer parameters.
    """

    tx: optax.GradientTransformation

    def init(self, params: Params) -> dict[str, PyTree]:
        """Returns outer parameters, and the outer optimizer's state."""
        return {"params": params, "opt_state": self.tx.init(params)}

    def __call__(
        self, reducer: Reducer, params: Params, outer: dict[str, PyTree]
    ) -> tuple[Params, dict[str, PyTree]]:
        """Returns the same parameters for all replicas, and their shared state."""
        start = outer["params"]
        with jax.named_scope("outer_step"):
            moved = jax.tree.map(jnp.subtract, start, params)
            # All parameters, also if no gradient reaches them.
            mean, _ = reducer(Finished(moved), (), reducer.plan(params))
        # The same on every replica, from the same mean: outer parameters need not be sent.
        with jax.named_scope(OPTIMIZER):
            updates, opt_state = self.tx.update(mean, outer["opt_state"], start)
            params = optax.apply_updates(start, updates)
        return params, {"params": params, "opt_state": opt_state}


@final
@dataclasses.dataclass(frozen=True)
class LocalSteps(Synchronization):
    """Local steps of each replica, between outer steps in which parameters are averaged.

        jddp.LocalSteps(every=16)                                              # their mean
        jddp.LocalSteps(every=16, start=1000)                                  # post-local SGD
        jddp.LocalSteps(16, optax.sgd(0.7, momentum=0.9, nesterov=True))       # DiLoCo

    Attributes:
      every: Number of steps from one outer step to the next.
      outer: Optimizer of the outer step, which takes the mean of (parameters after the last outer
        step - own) for a gradient of those parameters. By default SGD of rate 1, which gives the
        mean of the replicas' parameters. Or an outer step of your own, such as one that averages
        parts of the parameters in turn: an object like `jddp.engine.sync.OuterStep`.
      start: Number of first steps that are plain ones, with gradients averaged in each.

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
    outer: optax.GradientTransformation | OuterStep = MEAN
    start: int = 0

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        if self.every < 1 or self.start < 0:
            raise ConfigError(
                "LocalSteps: every is at least 1 and start at least 0; got "
                f"every={self.every}, start={self.start}."
            )

    def init(self, params: Params) -> PyTree:
        """Returns the shared state of outer steps."""
        return self._outer_step.init(params)

    def check(self, model_state: ModelState, keeps_own: KeepsOwn) -> None:
        """Refuses floating leaves that replicas would share.

        Raises:
          ConfigError: If there is one, with its name.
        """
        for path, x in jax.tree_util.tree_leaves_with_path(model_state):
            if is_float(x) and not keeps_own(path, x):
                raise ConfigError(
                    f"LocalSteps: replicas would have to agree on {name_of(path)!r} in each step, "
                    "and between outer steps nothing is to be sent. Choose batch_norm='local', or "
                    "declare its collection 'per_replica' in state=: each replica then has its "
                    "own, and their mean is evaluated."
                )

    def keeps_own(self, path: Path, x: PyTree) -> bool:
        """Returns True for floating leaves, which differ between outer steps."""
        return is_float(x)

    def layouts(self, state: TrainState, layouts: TrainState) -> TrainState:
        """Returns layouts with parameters, their average and the optimizer's state per replica."""
        own = {name: getattr(state, name) for name in ("params", "ema_params", "opt_state")}
        return layouts.replace(**{k: own_layouts(x, self.keeps_own) for k, x in own.items()})

    def sent(self, reducer: Reducer, plan: BucketPlan, params: Params) -> BucketPlan:
        """Plans all parameters, also those that no gradient reaches."""
        return self.note(reducer.plan(params))

    def note(self, plan: BucketPlan) -> BucketPlan:
        """Notes how often parameters are sent."""
        when = f"LocalSteps: sent every {self.every} steps"
        if self.start:
            when += f", and in each of the first {self.start}"
        return plan.noted(when)

    def view(self, of_packing: View) -> View:
        """Returns the view of a gradient of its own."""
        return View(of_packing.axis, is_mean=False)

    def mean(self, reducer: Reducer, plan: BucketPlan, local: Local, state: TrainState) -> Averaged:
        """Averages in the first `start` steps alone."""
        hook = state.comm_state.hook
        # Without plain steps no gradient is ever averaged, and the program needs no branch for it.
        if not self.start:
            return local.grads.tree(), hook
        # A collective stands in a branch, so all replicas must take the same one: the counts of
        # steps and of skipped steps are the same everywhere.
        return lax.cond(
            self._is_plain(state),
            lambda: reducer(local.grads, hook, plan, local.units),
            lambda: (local.grads.tree(), hook),
        )

    def count(self, state: TrainState, own: Array, mean: Array) -> Array:
        """Returns the mean in plain steps, else the count of the replica whose gradient it is."""
        return jnp.where(self._is_plain(state), mean, own)

    def settle(
        self, reducer: Reducer, local: Local, before: TrainState, after: TrainState
    ) -> TrainState:
        """Takes an outer step where one is due.

        A replica without a valid entry keeps its parameters, and counts the step.
        """
        # Without a valid entry the gradient is zero, but momentum and weight decay would still move
        # the parameters.
        learns = self._is_plain(before) | (local.count > 0)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(learns, new, old) if is_float(new) else new

        params, opt_state = jax.tree.map(
            choose, (after.params, after.opt_state), (before.params, before.opt_state)
        )
        # Skipped steps do not count, and only the devices know how many there were: the host would
        # have to wait for each step to choose the program.
        taken = before.step - before.skipped + 1
        is_due = ((taken - self.start) % self.every == 0).astype(jnp.int32)

        branches: list[Callable[[Params, PyTree], tuple[Params, PyTree]]] = [
            lambda params, outer: (params, outer),
            functools.partial(self._outer_step, reducer),
        ]
        if self.start:
            # In the plain steps parameters are equal already, and the outer ones follow without a
            # message.
            branches.append(lambda params, outer: (params, {**outer, "params": params}))
        chosen = jnp.where(taken <= self.start, 2, is_due)
        params, outer = lax.switch(chosen, branches, params, before.comm_state.outer)
        comm_state = dataclasses.replace(after.comm_state, outer=outer)
        return after.replace(params=params, opt_state=opt_state, comm_state=comm_state)

    @property
    def _outer_step(self) -> OuterStep:
        is_optimizer = isinstance(self.outer, optax.GradientTransformation)
        return MeanDifference(self.outer) if is_optimizer else self.outer

    def _is_plain(self, state: TrainState) -> Array:
        return state.step - state.skipped < self.start
