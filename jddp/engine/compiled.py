"""The steps of one spec on one mesh: planned and compiled for each form of rows.

A jitted step belongs to rows of one structure, shapes and dtypes; and rows of another form may use
other parameters, so they have other buckets too.

    steps = CompiledSteps(spec, mesh, donate=True, remake=remake)
    steps.planned(batch).plan                           # traces, computes nothing
    sent = steps.step_for(state, batch)
    state, metrics = sent.run(sent.state, sent.inputs)

`Trainable` is the interface by which training loops, checkpoints and checks know what they train.
`jddp.DataParallel` has it, and another object that has it can be trained, saved and resumed too.

Nothing here depends on which rows came last: a plan is a value, and a program belongs to it.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import jax
import numpy as np

from jddp.distributed.coordination import computing
from jddp.engine.calls import call
from jddp.engine.mesh import (
    HostOrDevice,
    RowSplit,
    is_key,
    put_rows,
    replicate,
    replicated,
    sharded,
    sharding_of,
)
from jddp.engine.planned import Planned, Plans, Program, digest_optimizer, digest_passes
from jddp.engine.state import (
    CommState,
    Inputs,
    Layout,
    PerReplica,
    Replicated,
    TrainState,
    Values,
    by_path,
    enter,
    form_key,
    merge_rows,
    own_layouts,
    shapes_of,
)
from jddp.engine.step import Step, make_step
from jddp.ground.errors import UsageError
from jddp.ground.typing import (
    Batch,
    Batches,
    Grads,
    JsonObject,
    LossFn,
    Metrics,
    ModelState,
    Params,
    PyTree,
    Settings,
    Shaped,
)
from jddp.modules.base import refuse_constants
from jddp.modules.rows import as_arrays
from jddp.reduce.plan import BucketPlan

StepFunction = Callable[[TrainState, Inputs], Any]
Maker = Callable[..., StepFunction]  # of spec, plan, mesh, layouts and donate, as `make_step`
Made = TypeVar("Made", bound=StepFunction)


class Call(NamedTuple):
    """A call of a jitted function.

    Attributes:
      planned: Plan of the step.
      run: The function, of a state and inputs.
      state: The state.
      inputs: The inputs, on the devices.
    """

    planned: Planned
    run: StepFunction
    state: TrainState
    inputs: Inputs


class CompiledSteps:
    """The compiled steps of one spec on one mesh.

    Args:
      spec: The parts of the step.
      mesh: The devices.
      init: The jitted function that makes a first state, `jddp.engine.initial_state.make_init`.
      donate: Whether a step reuses the memory of the state that it is given.
      remake: Function that makes the steps of the same options on another mesh.

    Attributes:
      spec: The parts of the step.
      mesh: The devices.
      rows: Division of rows over replicas and micro-batches.
      plans: The plans, for each form of a micro-batch.
    """

    def __init__(
        self,
        spec: Step,
        mesh: jax.sharding.Mesh,
        *,
        init: jax.stages.Wrapped,
        donate: bool,
        remake: Callable[[jax.sharding.Mesh], "CompiledSteps"],
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        num, num_local = spec.replicas.total(mesh.size), len(mesh.local_devices)
        self.rows = RowSplit(
            num, num // mesh.size * num_local, spec.backward.num, spec.replicas.noun
        )
        self.init = init
        self._constants: PyTree = None
        self.plans = Plans(spec, mesh, self.rows)
        self._hook_plans: list[BucketPlan] = []  # the last plan for which hook state was made
        # Programs by the function that makes them and the form of all rows.
        self._jitted: dict[Hashable, tuple[Planned, Any]] = {}
        self._donate = donate
        self._remake = remake

    def __str__(self) -> str:
        """The model, its devices, and the micro-batches of a step, if there are several."""
        num, kind = self.spec.backward.num, self.mesh.devices.flat[0].device_kind
        parts = f", {num} micro-batches a step" if num > 1 else ""
        return f"{self.spec.model.name} on {self.mesh.size} x {kind}{parts}"

    @property
    def topology(self) -> Settings:
        """Processes, devices and options by which a step divides its rows and statistics.

        A checkpoint keeps them, and a run that resumes reports where they differ.
        """
        model = self.spec.model
        sync = model.sync
        state = {**dict.fromkeys(model.per_replica, "per_replica"), **dict(sync.rules)}
        return {
            **({"state": state} if state else {}),
            "num_processes": jax.process_count(),
            "num_devices": self.mesh.size,
            "accumulate_steps": self.spec.backward.num,
            "batch_norm": model.batch_norm,
            "batch_norm_group_size": sync.group_size,
            "logical_replicas": self.spec.replicas.num,
            "local_steps": self.spec.sync.every,
        }

    def with_constants(self, constants: PyTree) -> "CompiledSteps":
        """The same steps, whose inputs have these constants; programs are shared.

        Raises:
          ConfigError: If neither loss names `constants`.
        """
        refuse_constants(self.spec.backward.loss_fn, self.spec.eval_fn)
        bound = copy.copy(self)
        bound._constants = replicate(constants, self.mesh)
        return bound

    def on(self, mesh: jax.sharding.Mesh) -> "CompiledSteps":
        """The steps of the same options on another mesh, also of devices that are not there."""
        other = self._remake(mesh)
        other._constants = shapes_of(self._constants)
        return other

    def inputs(self, batch: Batch, constants: PyTree = None) -> Inputs:
        """The inputs of a step: rows, and constants if the loss takes some."""
        bound = self if constants is None else self.with_constants(constants)
        return Inputs(batch, bound._constants)

    def planned(self, batch: Batch) -> Planned:
        """The plan for rows of this process, or for their shapes."""
        inputs = self._global(self.inputs(batch))
        return self.plans.of(self._first(inputs), inputs)

    def abstract_state(self, batch: Batch) -> TrainState:
        """Shapes, dtypes and shardings of a state, with nothing allocated.

        Args:
          batch: Rows of this process, or their shapes.
        """
        return self.shapes(self.inputs(batch))

    def shapes(self, inputs: Inputs) -> TrainState:
        """Shapes, dtypes and shardings of a state, for inputs of this process or their shapes."""
        inputs = self._global(inputs)
        state = self._first(inputs)
        comm_state = functools.partial(self.comm_state, self.plans.of(state, inputs))
        state = state.replace(comm_state=jax.eval_shape(comm_state, state.comm_state.outer))

        def place(x: Shaped, layout: Layout) -> jax.ShapeDtypeStruct:
            shape = (self.rows.num_replicas, *x.shape) if layout.is_per_replica else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding_of(layout, self.mesh))

        return jax.tree.map(place, state, self.layouts(state))

    def _first(self, inputs: Inputs) -> TrainState:
        """Shapes of the first state of one replica, but for the state of a hook."""
        return cast(TrainState, call(jax.eval_shape, self.init, *self._for_init(inputs)))

    def _for_init(self, inputs: Inputs) -> tuple[PyTree, ...]:
        values = self.spec.model.values or (None, None)
        return np.uint32(0), inputs._replace(rows=self.example(inputs.rows, values)), *values

    def example(self, batch: Batch, values: tuple[Params, ModelState | None]) -> Batch:
        """The rows with which a model makes its values, or their shapes.

        Args:
          batch: Rows of this process, or their shapes.
          values: Values that are known; None where nothing is to be made.

        Raises:
          UsageError: If rows are needed, and there are none.
        """
        if None not in values or (batch is None and values[0] is not None):
            return None
        if batch is None:
            raise UsageError(
                "init needs batch= (example rows, for their shapes) or params=: a Linen model "
                "makes its parameters by running the loss."
            )
        num_rows = self.rows.of_micro_batch(batch)

        def share(x: HostOrDevice | jax.ShapeDtypeStruct) -> Shaped:
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)
            own = x[:num_rows]
            return own if is_key(own) else np.asarray(own)

        return jax.tree.map(share, batch)

    def comm_state(self, planned: Planned, outer: PyTree) -> CommState:
        """The first state of the reducer, on one replica.

        Args:
          planned: Plan of the step.
          outer: State of the outer steps.

        Raises:
          UsageError: If a hook has state, and its buckets were planned without rows.
        """
        memory = self.spec.reducer.hook.init(planned.plan)
        self._hook_plans[:] = [planned.plan]
        if jax.tree.leaves(memory) and planned.traced is None:
            raise UsageError(
                "This hook keeps state for each bucket, and buckets are planned from "
                "the traced backward pass: init needs batch= (example rows, for their shapes)."
            )
        return CommState(
            # numpy arrays become JAX arrays of JAX's widths: a step would return a float64 array in
            # another dtype.
            hook=jax.tree.map(jax.numpy.asarray, memory),
            loss_scale=self.spec.guard.init(),
            outer=outer,
        )

    def layouts(self, state: TrainState) -> TrainState:
        """For each leaf of a state its `Layout`."""
        spec, everywhere = self.spec, jax.tree.map(lambda _: Replicated(), state)

        def placed(x: Shaped) -> Layout:
            return spec.placement.layout(x.shape)

        # Hook state differs per replica, such as an error of compression. It is declared so, since
        # JAX would let it leave a `shard_map` as replicated, and keep replica 0's.
        rule = spec.reducer.hook.on_resize.replace("drop", "reset")
        hook = jax.tree.map(lambda _: PerReplica(rule), state.comm_state.hook)
        layouts: TrainState = everywhere.replace(
            params=jax.tree.map(placed, state.params),
            ema_params=jax.tree.map(placed, state.ema_params),
            model_state=own_layouts(state.model_state, spec.model.keeps_own),
            ema_state=own_layouts(state.ema_state, spec.model.keeps_own),
            opt_state=spec.optimizer.layouts(state.params),
            comm_state=dataclasses.replace(everywhere.comm_state, hook=hook),
        )
        return spec.sync.layouts(state, layouts)

    def merged(self, values: Values) -> Values:
        """Values as they are read: per-replica leaves are averaged."""
        keeps_own = self.spec.sync.keeps_own, self.spec.model.keeps_own
        layouts = tuple(map(own_layouts, values, keeps_own))
        with computing(values):
            return merge_rows(values, layouts, replicated(self.mesh))

    def placed(self, batch: Batch) -> Batch:
        """Puts this process's rows on its devices.

        Raises:
          ConfigError: If the rows do not divide over replicas and micro-batches.
        """
        batch = as_arrays(batch)
        self.rows.check(batch)
        return put_rows(batch, self.mesh)

    def step_for(
        self,
        state: TrainState,
        batch: Batch,
        constants: PyTree = None,
        *,
        latest: TrainState | None = None,
        loss_limit: float | None = None,
        make: Maker = make_step,
    ) -> Call:
        """Returns the call of a step, with `DataParallel.step`'s arguments; compiles nothing yet.

        Args:
          state: A state.
          batch: Rows of this process.
          constants: Constants of the loss.
          latest: A state of these steps, if there is one.
          loss_limit: Loss above which the step changes nothing.
          make: Function that makes the program: the whole step, or as far as averaged gradients.

        Raises:
          UsageError: If it is no state of these steps, or if a hook has state of buckets that these
            rows do not have.
        """
        limit = None if loss_limit is None else np.float32(loss_limit)
        inputs = self.inputs(self.placed(batch), constants)._replace(loss_limit=limit)
        self.check(state, latest, inputs)
        return Call(*self._jitted_for(make, state, inputs), state, inputs)

    def check(
        self, state: TrainState, latest: TrainState | None, inputs: Inputs | None = None
    ) -> None:
        """Refuses a state that a step has taken, or that belongs to another model.

        If there are inputs, for a step, the optimizer's state is compared, too.

        Args:
          state: The state.
          latest: A state of these steps, if there is one.
          inputs: Inputs of a step.

        Raises:
          UsageError: If it is such a state, or is on other devices.
        """
        if not (isinstance(state, TrainState) and isinstance(state.step, jax.Array)):
            raise UsageError(
                f"A state on the devices is needed here, and this {type(state).__name__} is none. "
                "Give the state that init, step or restore returned, or a run's .state; or start "
                "from its values: init(params=state.params)."
            )
        if state.step.is_deleted():
            # JAX's own error names a buffer, but not the call that took it.
            number = state._taken_by
            which = "another step" if number is None else f"step call {number} of this DataParallel"
            raise UsageError(
                f"This state was given to {which}, which reused its memory. Continue with the "
                "state that the step returned (ddp.latest is the newest), or build "
                "DataParallel(..., donate=False)."
            )
        if state.step.committed and state.step.devices() != replicated(self.mesh).device_set:
            raise UsageError("This state lies on other devices: make one with init, or restore it.")
        own = latest or (None if inputs is None else self.shapes(inputs))
        if own is None or own is state:
            return
        shapes = functools.partial(jax.tree.map, np.shape)
        if shapes(own.params) != shapes(state.params):
            raise UsageError("This state has the parameters of another model: make one with init.")
        if inputs is not None and shapes(own.opt_state) != shapes(state.opt_state):
            raise UsageError(
                "This state is from another optimizer. Make one with init; "
                "init(params=state.params) keeps the parameters."
            )

    def _jitted_for(
        self, make: Callable[..., Made], state: TrainState, inputs: Inputs
    ) -> tuple[Planned, Made]:
        # Kept by hand, not in the cache of `jax.jit`, since each form of rows has its own plan.
        form = make, form_key(inputs)
        if form not in self._jitted:
            planned = self.plans.of(self._one(state), inputs)
            # Hook state is kept by bucket: with another plan it would be added to other gradients.
            has_state = jax.tree.leaves(state.comm_state.hook)
            if has_state and self._hook_plans not in ([], [planned.plan]):
                raise UsageError(
                    "These rows use other parameters than those that the hook was made for: "
                    "its state is of other buckets. Give init a batch that uses them too."
                )
            layouts = self.layouts(state)
            run = make(self.spec, planned.plan, self.mesh, layouts, donate=self._donate)
            self._jitted[form] = planned, run
        return self._jitted[form]

    def _one(self, state: TrainState) -> TrainState:
        """Shapes of one replica's state, from the shapes of the global state."""
        layouts = self.layouts(state)
        return cast(TrainState, jax.eval_shape(lambda state: enter(state, layouts), state))

    def lower(self, batch: Batch, accumulate_steps: int | None = None) -> jax.stages.Lowered:
        """Lowers the step for rows of this process, with nothing allocated or run.

        Args:
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
          accumulate_steps: Number of micro-batches of a step; by default the number in the options.
        """
        state, inputs = self.abstract_state(batch), self._global(self.inputs(batch))
        planned, run = self._jitted_for(make_step, state, inputs)
        if accumulate_steps is not None:
            # The plan stays: micro-batches change when gradients are finished, not which they are.
            backward = dataclasses.replace(self.spec.backward, num=accumulate_steps)
            spec = dataclasses.replace(self.spec, backward=backward)
            layouts = self.layouts(state)
            run = make_step(spec, planned.plan, self.mesh, layouts, donate=self._donate)
        return call(run.lower, state, inputs)

    def lower_init(self, batch: Batch) -> jax.stages.Lowered:
        """Lowers the program that makes a first state from a seed, with nothing allocated or run.

        Args:
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
        """
        return call(self.init.lower, *self._for_init(self.inputs(batch)))

    def _global(self, inputs: Inputs) -> Inputs:
        """The shapes of the rows of all processes together."""
        num_processes = self.rows.num_micro_batches // self.rows.count_micro_batches(inputs.rows)

        def everywhere(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0] * num_processes, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharded(self.mesh))

        # Shapes and dtypes as JAX takes them: JAX narrows a host's 64-bit numbers.
        return inputs._replace(rows=jax.tree.map(everywhere, shapes_of(inputs.rows)))

    def trace(self, batch: Batch) -> jax.stages.Traced:
        """Traces the step for rows of this process, with nothing allocated, compiled or run.

        Args:
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
        """
        state, inputs = self.abstract_state(batch), self._global(self.inputs(batch))
        _, run = self._jitted_for(make_step, state, inputs)
        return call(run.trace, state, inputs)

    def program(self, state: TrainState, batch: Batch) -> Program:
        """Digests of model, loss and optimizer, of traces that a step makes anyway; runs nothing.

        Args:
          state: A state, for its shapes.
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
        """
        self.rows.check(batch)
        inputs = self.inputs(batch)
        traced = self.plans.of(self._one(state), inputs).traced
        assert traced is not None  # There are rows.
        rows = by_path(self.plans.micro_batch(inputs).rows)
        form: JsonObject = {
            "rows": {name: [[*x.shape], str(x.dtype)] for name, x in rows.items()},
            "num_replicas": self.mesh.size,
            "num_micro_batches": self.spec.backward.num,
        }
        passes = digest_passes(traced, self.spec.axis)
        return Program(passes | digest_optimizer(self.spec, shapes_of(state.params)), form)

    def sent(self, batch: Batch) -> BucketPlan:
        """The plan of the arrays that are sent: gradients, or parameters with local steps."""
        state = self.abstract_state(batch)
        return self.spec.sync.sent(
            self.spec.reducer, self.planned(batch).plan, self._one(state).params
        )


@runtime_checkable
class Trainable(Protocol):
    """An object that takes steps, evaluates and predicts; `jddp.DataParallel` documents each.

    Attributes:
      latest: The newest state; None before there is one.
    """

    latest: TrainState | None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of devices."""

    @property
    def steps(self) -> CompiledSteps:
        """The step, known before it runs."""

    def init(self, seed: int = 0, batch: Batch = None) -> TrainState:
        """Makes the first state."""

    def check(self, state: TrainState) -> None:
        """Refuses a state whose memory a step has reused, or that belongs to another model."""

    def shard_batch(self, batch: Batch) -> Batch:
        """Places this process's rows on its devices."""

    def step(
        self,
        state: TrainState,
        batch: Batch,
        *,
        loss_limit: float | None = None,
        make: Maker = make_step,
    ) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; returns at once.

        Only `on_spike="skip"` gives a limit, and only `replay_every_steps` makes another program.
        """

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Grads, Metrics]:
        """The gradients of a step, and its metrics."""

    def evaluate(self, state: TrainState, batches: Batches, params: str = "params") -> Metrics:
        """Exact means of loss and metrics over every example."""

    def trace_evaluation(
        self, state: TrainState, batch: Batch, params: str = "params"
    ) -> list[str]:
        """The names of the metrics that `evaluate` returns; runs nothing."""

    def predict(
        self, state: TrainState, batches: Batches, function: LossFn, params: str = "params"
    ) -> PyTree:
        """The results of a function for each row."""

    def model(self, state: TrainState, params: str = "params") -> Any:  # noqa: ANN401  # Flax type
        """A copy of the model: Linen variables, or an NNX module in eval mode."""
