"""One step for each form of rows: its buckets planned, its program compiled.

A jitted step belongs to rows of one structure, shapes and dtypes; and rows of another form may use
other parameters, so they have other buckets too.

    steps = CompiledSteps(spec, mesh, donate=True)
    steps.plan_for(state, inputs)                # traces, computes nothing
    state, metrics = steps.step_for(state, inputs)(state, inputs)
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Wrapped

from jddp.distributed.waits import computing
from jddp.engine.executor import call
from jddp.engine.mesh import replicated, sharded
from jddp.engine.program import Form, Program, digest_passes, digest_step, form_of
from jddp.engine.spec import Step
from jddp.engine.state import (
    CommState,
    Inputs,
    PerReplica,
    Replicated,
    TrainState,
    Values,
    enter,
    merge_rows,
    own_layouts,
)
from jddp.engine.step import Traced, make_gradients, make_step, trace
from jddp.errors import ConfigError, UsageError
from jddp.modules.frozen import describe_frozen, thaw
from jddp.modules.metrics import Sums, weights_in
from jddp.modules.rows import check_rows, count_rows
from jddp.reduce.plan import BucketPlan
from jddp.typing import Batch, PyTree

Planned = tuple[BucketPlan, Traced | None]  # of rows of one form; no traced passes without rows


class CompiledSteps:
    """The compiled steps of one spec on one mesh.

    Args:
      spec: The parts of the step.
      mesh: The devices.
      donate: Whether a step reuses the memory of the state that it is given.

    Attributes:
      spec: The parts of the step.
      mesh: The devices.
      plan: The `BucketPlan` of the last rows; None before any.
      traced: Facts from the traced passes over the last rows; None before any.
    """

    def __init__(self, spec: Step, mesh: Mesh, *, donate: bool) -> None:
        self.plan: BucketPlan | None = None
        self.traced: Traced | None = None
        self.spec, self.mesh = spec, mesh
        self._plans: dict[Hashable, Planned] = {}  # by the form of one micro-batch
        # By what makes it, and the form of all rows.
        self._jitted: dict[Hashable, tuple[Planned, Wrapped]] = {}
        self._make_step = functools.partial(make_step, donate=donate)

    def __str__(self) -> str:
        """The model, its devices, and the micro-batches of a step, if there are several."""
        num, kind = self.spec.backward.num, self.mesh.devices.flat[0].device_kind
        parts = f", {num} micro-batches a step" * (num > 1)
        return f"{self.spec.model.name} on {self.mesh.size} x {kind}{parts}"

    @property
    def sums(self) -> Sums:
        """Shapes of the sums of loss and metrics of the last rows; none before any."""
        return {} if self.traced is None else self.traced.sums

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the loss and metrics that are scalars, for the last rows."""
        return tuple(name for name, x in self.sums.items() if x.is_scalar)

    @property
    def topology(self) -> dict[str, Any]:
        """Processes, devices and options by which a step divides its rows and statistics."""
        model, sync = self.spec.model, self.spec.model.sync
        kept = {"per_replica": [*model.per_replica], "state_reduction": dict(sync.rules)}
        return {
            **{name: kinds for name, kinds in kept.items() if kinds},
            "num_processes": jax.process_count(),
            "num_devices": self.mesh.size,
            "accumulate_steps": self.spec.backward.num,
            "batch_norm": model.batch_norm,
            "batch_norm_group_size": sync.group_size,
            "logical_replicas": self.spec.replicas.num,
            "local_steps": self.spec.sync.every,
        }

    def plan_for(self, state: TrainState, inputs: Inputs) -> None:
        """Plans buckets for one replica's state, as measured if there is a batch.

        Raises:
          ConfigError: If no gradient reaches a parameter, and unused_parameters is "error"; or if
            state of the model must be the same on all replicas, and local_steps lets it differ.
        """
        self.spec.sync.check(thaw({}, state.model_state)[1], self.spec.model.keeps_own)
        self.plan, self.traced = self._plan(state, inputs)

    def _plan(self, state: TrainState, inputs: Inputs) -> Planned:
        spec = self.spec
        if inputs.rows is None:
            return self._noted(spec.reduction.plan(state.params), state), None
        # By the form of one micro-batch: the same micro-batch in a larger batch has the same
        # buckets, and is not traced again.
        form = _form(part := self._part(inputs))
        if form not in self._plans:
            traced = call(trace, spec, self.mesh, _shapes(state), part)
            if not self._plans:
                _warn_of_weights(inputs.rows, traced.sums)
                _warn_of_constant_keys(traced)
                _warn_of_micro_batches(traced, spec.backward.num)
            _refuse_constant_loss(traced)
            plan = spec.reduction.plan(state.params, traced.ready)
            plan = self._noted(plan, state, traced.num_looped)
            self._plans[form] = plan, traced
        # Checked for each form of rows: another batch may leave other parameters unused.
        spec.optimizer.unused.check(self._plans[form][0])
        return self._plans[form]

    def _part(self, inputs: Inputs) -> Inputs:
        """Shapes of the inputs of one micro-batch."""
        num_rows = self.count_rows_of_part(inputs.rows)
        rows, constants = _shapes(inputs)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), rows)
        return Inputs(rows, constants)

    def _noted(self, plan: BucketPlan, state: TrainState, num_looped: int = 0) -> BucketPlan:
        """The plan, with notes on when buckets are sent, and on parameters that never are."""
        plan = plan.noted(*describe_frozen(state.model_state))
        return self.spec.sync.note(self.spec.backward.schedule.note(plan, num_looped))

    def comm_state(self) -> CommState:
        """The first state of the reduction, on one replica.

        Raises:
          UsageError: If a hook has state, and no rows have been planned for.
          ConfigError: If its state is not a tree of arrays.
        """
        assert self.plan is not None
        memory = self.spec.reduction.hook.init(self.plan)
        if jax.tree.leaves(memory) and not self._plans:
            raise UsageError(
                "This comm_hook keeps state for each bucket, and buckets are planned from "
                "the traced backward pass: init needs batch= (example rows, for their shapes)."
            )
        if not all(hasattr(x, "dtype") for x in jax.tree.leaves(memory)):
            raise ConfigError(f"comm_hook: init returns {memory}. It must return arrays.")
        return CommState(
            # numpy arrays become JAX's, of JAX's widths: a float64 array would not have the dtype
            # with which a step returns it.
            hook=jax.tree.map(jax.numpy.asarray, memory),
            loss_scale=self.spec.guard.init(),
        )

    def layouts(self, state: TrainState) -> TrainState:
        """For each leaf of a state its `Layout`."""
        spec, everywhere = self.spec, jax.tree.map(lambda _: Replicated(), state)
        # Hook state differs per replica, such as an error of compression. It is declared so, since
        # JAX would let it leave a `shard_map` as replicated, and keep replica 0's.
        rule = spec.reduction.hook.on_resize.replace("drop", "reset")
        hook = jax.tree.map(lambda _: PerReplica(rule), state.comm_state.hook)
        layouts: TrainState = everywhere.replace(
            model_state=own_layouts(state.model_state, spec.model.keeps_own),
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

    def step_for(self, state: TrainState, inputs: Inputs) -> Wrapped:
        """The jitted step for rows of this form; compiles nothing yet.

        Raises:
          UsageError: If a comm_hook has state of buckets that these rows do not have.
        """
        return self._for(self._make_step, state, inputs)

    def gradients_for(self, state: TrainState, inputs: Inputs) -> Wrapped:
        """The jitted step as far as its averaged gradients."""
        return self._for(make_gradients, state, inputs)

    def _for(self, make: Callable[..., Wrapped], state: TrainState, inputs: Inputs) -> Wrapped:
        # By hand, and not by `jax.jit`'s cache, since a form of rows has its own plan.
        form = make, _form(inputs)
        if form not in self._jitted:
            plan, traced = self._plan(self._one(state), inputs)
            # Hook state is kept by bucket: with another plan it would be added to other gradients.
            if jax.tree.leaves(state.comm_state.hook) and self.plan not in (None, plan):
                raise UsageError(
                    "These rows use other parameters than those that the comm_hook was made for: "
                    "its state is of other buckets. Give init a batch that uses them too."
                )
            jitted = make(self.spec, plan, self.mesh, self.layouts(state))
            self._jitted[form] = (plan, traced), jitted
        (self.plan, self.traced), jitted = self._jitted[form]
        return jitted

    def _one(self, state: TrainState) -> TrainState:
        """Shapes of one replica's state, from those of the global one."""
        layouts = self.layouts(state)
        one: TrainState = jax.eval_shape(lambda state: enter(state, layouts), state)
        return one

    def lower(
        self, state: TrainState, inputs: Inputs, accumulate_steps: int | None = None
    ) -> jax.stages.Lowered:
        """Lowers the step for a state and rows of one process, or for their shapes.

        With `accumulate_steps` it is another step, with as many micro-batches.
        """
        step = self.step_for(state, inputs)
        if accumulate_steps is not None:
            assert self.plan is not None
            # The plan stays: micro-batches change when gradients are finished, not which they are.
            backward = dataclasses.replace(self.spec.backward, num=accumulate_steps)
            spec = dataclasses.replace(self.spec, backward=backward)
            step = self._make_step(spec, self.plan, self.mesh, self.layouts(state))
        return call(step.lower, state, self._global(inputs))

    def _global(self, inputs: Inputs) -> Inputs:
        """The shapes of the rows of all processes together."""
        num_processes = self.mesh.size // len(self.mesh.local_devices)

        def everywhere(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0] * num_processes, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharded(self.mesh))

        # As JAX would take them: a host's 64-bit numbers are of no such shape on devices.
        return inputs._replace(rows=jax.tree.map(everywhere, _shapes(inputs.rows)))

    def trace(self, state: TrainState, inputs: Inputs) -> jax.stages.Traced:
        """Traces the step for a state and rows of one process, or for their shapes."""
        return call(self.step_for(state, inputs).trace, state, self._global(inputs))

    def program(self, state: TrainState, inputs: Inputs, form: Form | None = None) -> Program:
        """The digests of what is trained, of traces that a step makes anyway.

        Args:
          state: A state, or its shapes.
          inputs: Inputs of this process, or their shapes.
          form: Form of another program, in which model and loss are traced again where it differs.
        """
        step, part = self.trace(state, inputs).jaxpr, self._part(inputs)
        own, traced = form_of(part.rows, self.mesh.size, self.spec.backward.num), self.traced
        assert traced is not None  # of these rows, for which the step was traced
        if form not in (None, own):
            traced = self._trace_as(form, state, part)
        digests = {**digest_passes(traced, self.spec.axis), **digest_step(step, self.spec)}
        return Program(digests, form or own)

    def _trace_as(self, form: Form, state: TrainState, part: Inputs) -> Traced:
        """Traces the passes over a micro-batch in another form."""
        backward = dataclasses.replace(self.spec.backward, num=form.num_micro_batches)
        spec = dataclasses.replace(self.spec, backward=backward)
        mesh = AbstractMesh((form.num_replicas,), (self.spec.axis,))
        part = part._replace(rows=form.applied_to(part.rows))
        return call(trace, spec, mesh, _shapes(self._one(state)), part)

    def sent(self, state: TrainState) -> BucketPlan:
        """The plan of the arrays that are sent: gradients, or parameters with local steps."""
        assert self.plan is not None
        return self.spec.sync.sent(self.spec.reduction, self.plan, self._one(state).params)

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes together: one a device, or logical ones."""
        return self.spec.replicas.total(self.mesh.size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, of all replicas: a divisor of the global batch size."""
        return self.num_replicas * self.spec.backward.num

    @property
    def num_local_replicas(self) -> int:
        """Replicas of this process."""
        return self.num_replicas // self.mesh.size * len(self.mesh.local_devices)

    def count_micro_batches(self, batch: Batch) -> int:
        """Micro-batches of all replicas that have rows of this batch."""
        leaves = jax.tree.leaves(batch)
        # An array with rows on other processes is the global batch; any other holds this process's
        # rows.
        on_all = all(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
        return (self.num_replicas if on_all else self.num_local_replicas) * self.spec.backward.num

    def check_rows(self, batch: Batch) -> None:
        """Refuses rows that are not a multiple of the micro-batches.

        Raises:
          ConfigError: If they are not, with the sizes that would be.
        """
        num, num_parts = self.spec.backward.num, self.count_micro_batches(batch)
        what = f"{num_parts // num} {self.spec.replicas.noun}"
        what += f" times accumulate_steps={num}" * (num > 1)
        check_rows(count_rows(batch), num_parts, what)

    def count_rows_of_part(self, batch: Batch) -> int:
        """Rows of a micro-batch; at least one."""
        # A batch that is empty, or has fewer rows than micro-batches, is planned for as one row.
        return max(1, count_rows(batch) // self.count_micro_batches(batch))


def _refuse_constant_loss(traced: Traced) -> None:
    """Refuses a loss from which no parameter gets a gradient: nothing would be trained.

    Raises:
      ConfigError: If it is such a loss, whatever `unused_parameters` is: that is about single ones.
    """
    if traced.ready and all(ready is None for ready in traced.ready):
        raise ConfigError(
            "No gradient reaches any parameter: the loss does not depend on them. Return the loss "
            "as JAX computes it from the model's outputs, without stop_gradient, numpy or float()."
        )


def _warn_of_weights(batch: Batch, sums: Sums) -> None:
    if (names := weights_in(batch)) and sums["loss"].is_scalar:
        logging.getLogger("jddp").warning(
            f"The loss is a scalar, and the batch has {names[0]!r}: replicas are weighted equally, "
            "whatever the weights of their rows. If the loss is sum(l * w) / sum(w), return "
            "jddp.Mean(l * w, w) instead."
        )


def _warn_of_constant_keys(traced: Traced) -> None:
    if traced.has_constant_key:
        logging.getLogger("jddp").warning(
            "The loss uses random numbers of a key made from constants, such as "
            "jax.random.key(0) or nnx.Rngs(0): they are the same in every step and on every "
            "replica. Give loss_fn an argument `key`, which is another in each."
        )


def _warn_of_micro_batches(traced: Traced, num: int) -> None:
    if traced.has_batch_statistics:
        logging.getLogger("jddp").warning(
            f"accumulate_steps={num}: batch norm takes the statistics of each micro-batch, and not "
            "of the whole batch, so this is another step than that of the whole batch."
        )


def _form(tree: PyTree) -> Hashable:
    """The form that a jitted function is compiled for: structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)


def _shapes(tree: PyTree) -> PyTree:
    """Shapes and dtypes, as JAX would take them."""
    return jax.eval_shape(lambda x: x, tree)
