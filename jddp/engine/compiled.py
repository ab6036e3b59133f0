"""One step for each form of rows: its buckets planned, its program compiled.

A jitted step belongs to rows of one structure, shapes and dtypes; and rows of another form may use
other parameters, so their buckets are others too.

    steps = CompiledSteps(recipe, mesh, donate=True)
    steps.plan_for(state, inputs)                # traces, computes nothing
    state, metrics = steps.step_for(state, inputs)(state, inputs)
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jddp.engine.executor import call
from jddp.engine.mesh import platform, sharded
from jddp.engine.optimizer import optimizer_layouts
from jddp.engine.spec import Inputs, Recipe
from jddp.engine.state import CommState, PerReplica, Replicated, TrainState, enter, own_layouts
from jddp.engine.step import make_gradients, make_step, trace
from jddp.engine.sync import check_own
from jddp.errors import ConfigError, UsageError
from jddp.modules.metrics import Sums, weights_in
from jddp.modules.rows import count_rows
from jddp.reduce import BucketPlan, compiler_options
from jddp.typing import Batch, PyTree


class CompiledSteps:
    """The steps of one recipe on one mesh.

    Args:
      recipe: What a step is made of.
      mesh: The devices.
      donate: Whether a step reuses the memory of the state that it is given.

    Attributes:
      recipe: What a step is made of.
      mesh: The devices.
      plan: The `BucketPlan` of the rows that came last; None before any.
      sums: Shapes of the sums of loss and metrics of the rows that came last; none before any.
      draws: Whether model or loss draw random numbers for them.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh, *, donate: bool) -> None:
        self.plan: BucketPlan | None = None
        self.sums: Sums = {}
        self.recipe, self.mesh = recipe, mesh
        self.draws = False
        self._plans: dict[Hashable, Any] = {}  # with sums and draws, by the form of one part
        self._jitted: dict[Hashable, Any] = {}  # by what makes it and the form of all rows
        self._make_step: Callable[..., Any] = functools.partial(make_step, donate=donate)

    def plan_for(self, state: TrainState, inputs: Inputs) -> BucketPlan:
        """Plans buckets for one replica's state, as measured if there is a batch.

        Raises:
          ConfigError: If no gradient reaches a parameter, and unused_parameters is "error"; or if
            the model needs replicas to agree where local_steps keep them apart.
        """
        if self.recipe.local_steps is not None:
            check_own(state.model_state, self.recipe.model.keeps_own)
        self.plan = self._plan(state, inputs)
        return self.plan

    def _plan(self, state: TrainState, inputs: Inputs) -> BucketPlan:
        recipe = self.recipe
        if inputs.rows is None:
            return self._noted(recipe.reduction.plan(state.params))
        num_rows = self.count_rows_of_part(inputs.rows)
        rows, constants = _shapes(inputs)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), rows)
        part = Inputs(rows, constants)
        form = _form(part)
        if form not in self._plans:
            ready, sums, draws = call(trace, recipe, self.mesh, _shapes(state), part)
            if not self._plans:
                self._warn_of_weights(weights_in(inputs.rows), sums)
            plan = self._noted(recipe.reduction.plan(state.params, *ready))
            self._plans[form] = plan, sums, draws
        plan, self.sums, self.draws = self._plans[form]
        if plan.unused and recipe.unused_parameters == "error":
            raise ConfigError(
                f"No gradient reaches {', '.join(plan.unused)}. Use them in the loss, or "
                "choose unused_parameters='zero' or 'skip'."
            )
        return plan

    def _warn_of_weights(self, names: Sequence[str], sums: Sums) -> None:
        if names and sums["loss"].is_scalar:
            logging.getLogger("jddp").warning(
                f"The loss is a scalar, and the batch has {names[0]!r}: replicas weigh alike, "
                "whatever their rows weigh. If the loss is sum(l * w) / sum(w), return "
                "jddp.Mean(l * w, w) instead."
            )

    def _noted(self, plan: BucketPlan) -> BucketPlan:
        """The plan, which says that it is not for each step where that is so."""
        local = self.recipe.local_steps
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
        memory = self.recipe.reduction.hook.init(self.plan)
        if jax.tree.leaves(memory) and not self._plans:
            raise UsageError(
                "This comm_hook remembers something for each bucket, and buckets are planned from "
                "the traced backward pass: init needs batch= (example rows, for their shapes)."
            )
        if not all(hasattr(x, "dtype") for x in jax.tree.leaves(memory)):
            raise ConfigError(f"comm_hook: init returns {memory}. It must return arrays.")
        return CommState(
            hook=jax.tree.map(jax.numpy.asarray, memory),
            loss_scale=self.recipe.guard.init(),
        )

    def layouts(self, state: TrainState) -> TrainState:
        """For each leaf of a state its `Layout`."""
        recipe, everywhere = self.recipe, jax.tree.map(lambda _: Replicated(), state)
        rule = recipe.reduction.hook.on_resize.replace("drop", "reset")
        hook = jax.tree.map(lambda _: PerReplica(rule), state.comm_state.hook)
        layouts: TrainState = everywhere.replace(
            model_state=own_layouts(state.model_state, recipe.model.keeps_own),
            comm_state=dataclasses.replace(everywhere.comm_state, hook=hook),
        )
        if recipe.local_steps is None:
            return layouts.replace(opt_state=optimizer_layouts(recipe, state.params))
        own = {name: getattr(state, name) for name in ("params", "ema_params", "opt_state")}
        return layouts.replace(**{k: own_layouts(x, recipe.keeps_own) for k, x in own.items()})

    def step_for(self, state: TrainState, inputs: Inputs) -> Any:
        """The jitted step for rows of this form; compiles nothing yet.

        Raises:
          UsageError: If a comm_hook remembers buckets that these rows do not have.
        """
        return self._for(self._make_step, state, inputs)

    def gradients_for(self, state: TrainState, inputs: Inputs) -> Any:
        """The same as far as the averaged gradients."""
        return self._for(make_gradients, state, inputs)

    def _for(self, make: Callable[..., Any], state: TrainState, inputs: Inputs) -> Any:
        form = make, _form(inputs)
        if form not in self._jitted:
            layouts = self.layouts(state)
            given = self.recipe, self._plan_again(state, inputs, layouts), self.mesh, layouts
            self._jitted[form] = make(*given, options=self._options)
        return self._jitted[form]

    def _plan_again(self, state: TrainState, inputs: Inputs, layouts: TrainState) -> BucketPlan:
        """Plans for rows as they are given to a step, beside the state that it is given."""
        one = jax.eval_shape(functools.partial(enter, layouts=layouts), state)
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
        return compiler_options(self.recipe.reduction, platform(self.mesh))

    def lower(
        self, state: TrainState, inputs: Inputs, accumulate_steps: int | None = None
    ) -> jax.stages.Lowered:
        """Lowers the step for a state and rows of one process, or for their shapes.

        With `accumulate_steps` it is another step, with as many micro-batches.
        """
        step = self.step_for(state, inputs)
        if accumulate_steps is not None:
            recipe = dataclasses.replace(self.recipe, accumulate_steps=accumulate_steps)
            given = recipe, self.plan, self.mesh, self.layouts(state)
            step = self._make_step(*given, options=self._options)
        return call(step.lower, state, self._global(inputs))

    def _global(self, inputs: Inputs) -> Inputs:
        """The shapes of the rows of all processes together."""
        num_processes = self.mesh.size // len(self.mesh.local_devices)

        def everywhere(x: Any) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0] * num_processes, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharded(self.mesh))

        # As JAX would take them: a host's 64-bit numbers are of no such shape on devices.
        return inputs._replace(rows=jax.tree.map(everywhere, _shapes(inputs.rows)))

    def trace(self, state: TrainState, inputs: Inputs) -> jax.stages.Traced:
        """Traces the step for a state and rows of one process, or for their shapes."""
        return call(self.step_for(state, inputs).trace, state, self._global(inputs))

    def plan_of_all(self, state: TrainState) -> BucketPlan:
        """The plan of all parameters, whether gradients reach them or not."""
        one = jax.eval_shape(functools.partial(enter, layouts=self.layouts(state)), state)
        return self._noted(self.recipe.reduction.plan(one.params))

    @property
    def num_shards(self) -> int:
        """Logical shards of all processes together; one a device unless the recipe has more."""
        return self.recipe.num_shards or self.mesh.size

    @property
    def num_local_shards(self) -> int:
        """Those of this process."""
        return self.num_shards // self.mesh.size * len(self.mesh.local_devices)

    def count_parts(self, batch: Batch) -> int:
        """Into how many parts the rows of this process, or of all where they are global, split."""
        leaves = jax.tree.leaves(batch)
        on_all = all(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
        return (self.num_shards if on_all else self.num_local_shards) * self.recipe.accumulate_steps

    def count_rows_of_part(self, batch: Batch) -> int:
        """Rows of one replica and one part; at least one."""
        return max(1, count_rows(batch) // self.count_parts(batch))


def _form(tree: PyTree) -> Hashable:
    """What a jitted function is compiled for: structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)


def _shapes(tree: PyTree) -> PyTree:
    """Shapes and dtypes, as JAX would take them."""
    return jax.eval_shape(lambda x: x, tree)
