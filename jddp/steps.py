"""One step for each form of rows: its buckets planned, its program compiled, what it sends told.

A jitted step belongs to rows of one structure, shapes and dtypes; and rows of another form may use
other parameters, so their buckets are others too.

    steps = Steps(recipe, mesh, donate=True)
    steps.plan_for(state, inputs)                # traces, computes nothing
    state, metrics = steps.step_for(state, inputs)(state, inputs)
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
from jax.sharding import Mesh

from jddp.dispatch import call
from jddp.errors import ConfigError, UsageError
from jddp.explanation import Explanation, explain
from jddp.local_steps import check_own
from jddp.loss_scale import DYNAMIC, first_loss_scale
from jddp.memory import Memory, measure
from jddp.mesh import count_rows, platform, sharded
from jddp.recipe import Inputs, Recipe
from jddp.reduce import BucketPlan, compiler_options
from jddp.state import CommState, Kind, TrainState, enter, float_kinds
from jddp.step import make_gradients, make_step, trace
from jddp.update import optimizer_kinds

PyTree = Any
ON_RESIZE = {"mean": Kind.AVERAGED, "sum": Kind.SUMMED, "drop": Kind.ANEW}


class Steps:
    """The steps of one recipe on one mesh.

    Args:
      recipe: What a step is made of.
      mesh: The devices.
      donate: Whether a step reuses the memory of the state that it is given.

    Attributes:
      plan: The `BucketPlan` of the rows that came last; None before any.
      scalars: The loss and metrics that are scalars, by name; none before any rows.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh, *, donate: bool) -> None:
        self.plan: BucketPlan | None = None
        self.scalars: tuple[str, ...] = ()
        self._recipe, self._mesh, self._donate = recipe, mesh, donate
        self._plans: dict[Hashable, BucketPlan] = {}  # by the form of one replica's part
        self._steps: dict[Hashable, Any] = {}  # jitted, by the form of all rows
        self._gradients: dict[Hashable, Any] = {}  # the same as far as the gradients

    def plan_for(self, state: TrainState, inputs: Inputs) -> BucketPlan:
        """Plans buckets for one replica's state, as measured if there is a batch.

        Raises:
          ConfigError: If no gradient reaches a parameter, and unused_parameters is "error"; or if
            the model needs replicas to agree where local_steps keep them apart.
        """
        if self._recipe.local_steps is not None:
            check_own(state.model_state, self._recipe.model.keeps_own)
        self.plan = self._plan(state, inputs)
        return self.plan

    def _plan(self, state: TrainState, inputs: Inputs) -> BucketPlan:
        recipe = self._recipe
        if inputs.rows is None:
            return self._noted(recipe.reduction.plan(state.params))
        num_rows = self.count_rows_of_part(inputs.rows)
        rows, constants = _shapes(inputs)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), rows)
        part = Inputs(rows, constants)
        form = _form(part)
        if form not in self._plans:
            *measured, self.scalars = call(trace, recipe, self._mesh, _shapes(state), part)
            self._plans[form] = self._noted(recipe.reduction.plan(state.params, *measured))
        plan = self._plans[form]
        if plan.unused and recipe.unused_parameters == "error":
            raise ConfigError(
                f"No gradient reaches {', '.join(plan.unused)}. Use them in the loss, or "
                "choose unused_parameters='zero' or 'skip'."
            )
        return plan

    def _noted(self, plan: BucketPlan) -> BucketPlan:
        """The plan, which says that it is not for each step where that is so."""
        local = self._recipe.local_steps
        if local is None:
            return plan
        when = f"local_steps: sent every {local.every} steps"
        when += f", and in each of the first {local.start}" * bool(local.start)
        return dataclasses.replace(plan, notes=(*plan.notes, when))

    def comm_state(self) -> CommState:
        """What the reduction remembers at first, on one replica.

        Raises:
          UsageError: If it remembers something, and no rows have been planned for.
          ConfigError: If that is not a tree of arrays.
        """
        assert self.plan is not None
        memory = self._recipe.reduction.hook.init(self.plan)
        if jax.tree.leaves(memory) and not self._plans:
            raise UsageError(
                "This comm_hook remembers something for each bucket, and buckets are planned from "
                "the traced backward pass: init needs batch= (example rows, for their shapes)."
            )
        if not all(hasattr(x, "dtype") for x in jax.tree.leaves(memory)):
            raise ConfigError(f"comm_hook: init returns {memory}. It must return arrays.")
        return CommState(
            hook=jax.tree.map(jax.numpy.asarray, memory),
            loss_scale=first_loss_scale() if self._recipe.loss_scale == DYNAMIC else (),
        )

    def kinds(self, state: TrainState) -> TrainState:
        """For each leaf of a state, how it lies on the mesh."""
        kind = ON_RESIZE[self._recipe.reduction.hook.on_resize]
        kinds: TrainState = jax.tree.map(lambda _: Kind.REPLICATED, state)
        kinds = kinds.replace(
            model_state=float_kinds(state.model_state, self._recipe.model.keeps_own),
            comm_state=dataclasses.replace(
                kinds.comm_state, hook=jax.tree.map(lambda _: kind, state.comm_state.hook)
            ),
        )
        if self._recipe.local_steps is None:
            opt_state = optimizer_kinds(self._recipe, state.params)
            return kinds.replace(opt_state=opt_state)
        own = {
            field: float_kinds(getattr(state, field), lambda _: True)
            for field in ("params", "ema_params", "opt_state")
        }
        return kinds.replace(**own)

    def step_for(self, state: TrainState, inputs: Inputs) -> Any:
        """The jitted step for rows of this form; compiles nothing yet.

        Raises:
          UsageError: If a comm_hook remembers buckets that these rows do not have.
        """
        form = _form(inputs)
        if form not in self._steps:
            kinds = self.kinds(state)
            self._plan_again(state, inputs, kinds)
            self._steps[form] = self._make_step(self._recipe, kinds)
        return self._steps[form]

    def gradients_for(self, state: TrainState, inputs: Inputs) -> Any:
        """The same as far as the averaged gradients."""
        form = _form(inputs)
        if form not in self._gradients:
            kinds = self.kinds(state)
            plan = self._plan_again(state, inputs, kinds)
            self._gradients[form] = make_gradients(
                self._recipe, plan, self._mesh, kinds, options=self._options
            )
        return self._gradients[form]

    def _plan_again(self, state: TrainState, inputs: Inputs, kinds: TrainState) -> BucketPlan:
        """Plans for rows as they are given to a step, beside the state that it is given."""
        one = jax.eval_shape(functools.partial(enter, kinds=kinds), state)
        plan, before = self._plan(one, inputs), self.plan
        if jax.tree.leaves(state.comm_state.hook) and before not in (None, plan):
            raise UsageError(
                "These rows use other parameters than those that the comm_hook was made for: "
                "its memory is of other buckets. Give init a batch that uses them too."
            )
        self.plan = plan
        return plan

    @property
    def _options(self) -> dict[str, Any]:
        return compiler_options(self._recipe.reduction, platform(self._mesh))

    def _make_step(self, recipe: Recipe, kinds: TrainState) -> Any:
        assert self.plan is not None
        options = self._options
        return make_step(recipe, self.plan, self._mesh, kinds, donate=self._donate, options=options)

    def lower(self, state: TrainState, inputs: Inputs) -> jax.stages.Lowered:
        """Lowers the step for a state and rows of one process, or for their shapes."""
        return self._lower(self.step_for(state, inputs), state, inputs)

    def _lower(
        self, step: Any, state: TrainState, inputs: Inputs, *, times: int = 1
    ) -> jax.stages.Lowered:
        """Lowers a step for `times` as many rows as are given, of all processes together."""
        return call(step.lower, state, self._global(inputs, times))

    def _global(self, inputs: Inputs, times: int = 1) -> Inputs:
        """The shapes of `times` as many rows as are given, of all processes together."""
        times *= self._mesh.size // len(self._mesh.local_devices)

        def everywhere(x: Any) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0] * times, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharded(self._mesh))

        # As JAX would take them: a host's 64-bit numbers are of no such shape on devices.
        return inputs._replace(rows=jax.tree.map(everywhere, _shapes(inputs.rows)))

    def trace(self, state: TrainState, inputs: Inputs) -> jax.stages.Traced:
        """Traces the step for a state and rows of one process, or for their shapes."""
        traced: jax.stages.Traced = call(
            self.step_for(state, inputs).trace, state, self._global(inputs)
        )
        return traced

    def memory(self, state: TrainState, inputs: Inputs, accumulate_steps: int | None) -> Memory:
        """Compiles the step, perhaps with another number of parts, and measures it."""
        step, recipe = self.step_for(state, inputs), self._recipe
        if accumulate_steps is not None:
            recipe = dataclasses.replace(recipe, accumulate_steps=accumulate_steps)
            step = self._make_step(recipe, self.kinds(state))
        compiled = self._lower(step, state, inputs).compile()
        return measure(compiled, state, inputs.rows, self._mesh)

    def explain(self, state: TrainState, inputs: Inputs) -> Explanation:
        """Compiles the step, and compares it with that of twice the rows, and twice the parts."""
        lowered = self.lower(state, inputs)
        num_parts = 2 * self._recipe.accumulate_steps
        more_parts = dataclasses.replace(self._recipe, accumulate_steps=num_parts)
        doubled = [
            self._lower(step, state, inputs, times=2)
            for step in (
                self.step_for(state, inputs),
                self._make_step(more_parts, self.kinds(state)),
            )
        ]
        local, plan = self._recipe.local_steps, self.plan
        if local is not None:  # all parameters travel, not those alone that have gradients
            one = jax.eval_shape(functools.partial(enter, kinds=self.kinds(state)), state)
            plan = self._noted(self._recipe.reduction.plan(one.params))
        assert plan is not None
        return explain(lowered, doubled, plan=plan, mesh=self._mesh, local_steps=local)

    @property
    def num_shards(self) -> int:
        """Logical shards of all processes together; one a device unless the recipe has more."""
        return self._recipe.num_shards or self._mesh.size

    @property
    def num_local_shards(self) -> int:
        """Those of this process."""
        return self.num_shards // self._mesh.size * len(self._mesh.local_devices)

    def count_parts(self, batch: PyTree) -> int:
        """Into how many parts the rows of this process, or of all where they are global, split."""
        leaves = jax.tree.leaves(batch)
        on_all = all(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
        return (
            self.num_shards if on_all else self.num_local_shards
        ) * self._recipe.accumulate_steps

    def count_rows_of_part(self, batch: PyTree) -> int:
        """Rows of one replica and one part; at least one."""
        return max(1, count_rows(batch) // self.count_parts(batch))


def _form(tree: PyTree) -> Hashable:
    """What a jitted function is compiled for: structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)


def _shapes(tree: PyTree) -> PyTree:
    """Shapes and dtypes, as JAX would take them."""
    return jax.eval_shape(lambda x: x, tree)
