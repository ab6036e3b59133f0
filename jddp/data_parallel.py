"""`jddp.DataParallel`: a model, an optimizer and a loss, replicated over a mesh.

    ddp = jddp.DataParallel(model, optax.adamw(1e-3), loss_fn)
    state = ddp.init(seed=0, batch=example_batch)
    state, metrics = ddp.step(state, batch)      # batch: this process's rows
    metrics = ddp.evaluate(state, batches)       # exact over every example

This room checks the user's options, and places batches. The step itself is defined in
`engine.step`; `engine.compiled` plans and compiles it for rows of one form.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jddp.checkpoint.checkpoints import Checkpoints
from jddp.checkpoint.weights import Loaded
from jddp.distributed.watchdog import Limits
from jddp.engine.bitwise.rows_of_sums import pack_rows
from jddp.engine.clip import choose_clip
from jddp.engine.compiled import CompiledSteps
from jddp.engine.evaluate import (
    evaluate_exactly,
    make_evaluate,
    make_predict,
    numbered,
    predict_rows,
    sums_of,
)
from jddp.engine.executor import Executor, run_compiled
from jddp.engine.guard import choose_guard, unscaled
from jddp.engine.host_rows import as_arrays
from jddp.engine.mesh import (
    axis_of,
    copy_off_mesh,
    is_of_several_processes,
    make_mesh,
    platform,
    put_rows,
    replicate,
)
from jddp.engine.moving_average import choose_average, chosen_params
from jddp.engine.optimizer import choose_optimizer
from jddp.engine.program import Form, Program
from jddp.engine.replicas import choose_replicas
from jddp.engine.schedule import choose_backward
from jddp.engine.spec import Step, refuse_pairs
from jddp.engine.state import Inputs, TrainState, Values
from jddp.engine.sync import EveryStep, LocalSteps
from jddp.html import Shown
from jddp.initial_state import InitialState
from jddp.inspection.explain import Explanation, explain
from jddp.inspection.memory import Memory, measure_memory
from jddp.inspection.norms import Layers, diagnose
from jddp.modules.batch_norm import Sync
from jddp.modules.frozen import Frozen, thaw
from jddp.modules.functional import functional, refuse_constants
from jddp.reduce.average import BUCKET_MB, bucket_sizes, choose_layout, make_reduction
from jddp.reduce.hooks import as_is
from jddp.reduce.packing import Layout, choose_packing
from jddp.reduce.plan import BucketPlan
from jddp.trainer.callbacks import Callback
from jddp.trainer.fit import LIMITS, Kept, choose_batches, train
from jddp.trainer.own_loop import Saves, pad_for_step
from jddp.trainer.plan import Plan
from jddp.trainer.run import Run
from jddp.typing import Batch, Batches, Grads, LossFn, Metrics, Params, PyTree
from jddp.zoo.losses import outputs
from jddp.zoo.names import refuses_unknown
from jddp.zoo.synonyms import OF_DATA_PARALLEL, OF_FIT


class DataParallel(Shown):
    """Data-parallel training of any Flax model, equal to one device on the whole batch.

    Args:
      model: A Linen module, or an NNX module, whose values the first state copies.
      optimizer: Any optax optimizer.
      loss_fn: Function `loss_fn(model, batch)` or `loss_fn(model, batch, train)`, run on the b rows
        of one replica. It returns losses of shape (b, ...), a scalar (this replica's mean), or a
        `jddp.Mean(total, count)`; alone or with a dict of metrics of such forms. An argument
        `constants` is passed the tree of `step(..., constants=)`, whole on every replica; an
        argument `key` a PRNG key, another in every step, replica and micro-batch.
      mesh: A mesh of one axis, devices, a number of them, or None for all.
      axis_name: Name of the axis of the replicas, for models and losses that use one by name, such
        as `lax.pmean(x, "batch")`; by default that of the given mesh, or else "data".
      bucket_mb: Largest size of a gradient bucket on the wire, in MiB; or sizes of the first, the
        second, ..., of which the last repeats.
      layout: Form of a bucket: "leaf" (gradients as they are), "flat" (one vector), or "auto": flat
        on GPUs, leaf elsewhere.
      overlap: Whether buckets are reduced inside the backward pass, each where its last gradient is
        made, and not after it; or "auto": on several GPUs. The numbers are the same.
      wire_dtype: Dtype to which wider gradients are cast on the wire: "bfloat16" or "float16".
      comm_hook: A `CommHook` that reduces a bucket, in place of the mean.
      batch_norm: Statistics that batch norm uses: "sync" (of the global batch), "broadcast" (of
        replica 0; with a mask, of the first replica with a valid row in the micro-batch)
        or "local" (each replica its own, averaged when evaluated or read). Axis names of the layers
        are ignored.
      batch_norm_group_size: Number of neighbouring replicas that share statistics under "sync";
        None for all.
      batch_norm_unbiased: Whether running variances are unbiased, as PyTorch keeps them.
      per_replica: Names of the state beside the parameters that each replica keeps for itself:
        collections (Linen), or classes of variables (NNX). Their arrays are neither synchronized
        nor compared; they are averaged when evaluated or read, whole numbers rounded down.
      frozen: Parameters that are not trained: regular expressions for whole paths, such as
        "backbone/.*", or a function of a path. They are not differentiated, sent or updated, and
        have no optimizer state; they stand in `state.model_state["params"]`.
      compute_dtype: "bfloat16" or "float16": dtype to which parameters and inputs of the model are
        cast where the loss calls it. Its outputs are cast back: the loss, batch statistics,
        gradients and the optimizer are in float32. A layer with another dtype is refused. In NNX a
        submodule that the loss itself calls returns this dtype: cast what it returns.
      state_reduction: Rules by which replicas synchronize, in each step, other state that depends
        on their rows or random numbers, by name of the collection or class: "mean", "sum" (of what
        each has added, exact for whole numbers) or "first" (replica 0's). Such state is refused
        without a rule, unless it is that of a batch norm; equal state is left as it is.
      accumulate_steps: Number of micro-batches into which each replica's rows are split, run one
        after the other, with one reduction for all.
      shard_optimizer: Whether each replica updates its shard of every parameter, and keeps the
        optimizer's state only for that shard (ZeRO, stage 1). The optimizer must be separable (work
        element by element), which is read from its equations.
      logical_replicas: Number of replicas on which a step is defined, a multiple of the number of
        devices: results are bitwise identical on any number of CPU devices that divides it; on
        GPUs see docs/bitwise.md. None for one replica a device.
      local_steps: A `LocalSteps`: each replica takes steps alone, and parameters are synchronized
        now and then. The mean of the replicas is evaluated, predicted with and exported.
      max_grad_norm: Global norm to which the averaged gradient is clipped; with `local_steps`, each
        replica clips its own.
      ema_decay: Decay of `ema_params`, a moving average of the parameters; None for none.
      unused_parameters: Treatment of parameters that no gradient reaches: "zero" (the optimizer
        gets zeros), "skip" (it leaves them alone), "error" (they are refused, by name).
      skip_nonfinite: Whether a step is skipped, which changes nothing but counts, if its loss or
        gradients are not finite, or it would make other state so.
      loss_scale: A power of two by which each replica's mean loss is multiplied in the backward
        pass, for models that compute in float16, so that small gradients do not become zero.
        Averaged gradients are divided by it. "dynamic" adapts it as PyTorch's GradScaler does, and
        skips steps whose gradients overflow, as `skip_nonfinite` does.
      eval_fn: The loss for evaluation; by default `loss_fn` with `train=False`.
      donate: Whether `step` reuses the memory of the state that it is given.

    Raises:
      ConfigError: If an option breaks its rule.

    Attributes:
      mesh: The mesh of devices.
      spec: The parts of a step.
      steps: Plans, traces and compiled programs of the step, for tools that inspect it.
    """

    @refuses_unknown("DataParallel", OF_DATA_PARALLEL)
    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        loss_fn: LossFn,
        *,
        mesh: Mesh | Sequence[jax.Device] | int | None = None,
        axis_name: str | None = None,
        bucket_mb: float | Sequence[float] = BUCKET_MB,
        layout: str = "auto",
        overlap: bool | str = "auto",
        wire_dtype: Any = None,
        comm_hook: Any = None,
        batch_norm: str = "sync",
        batch_norm_group_size: int | None = None,
        batch_norm_unbiased: bool = False,
        per_replica: Sequence[str] = (),
        frozen: Frozen = (),
        compute_dtype: Any = None,
        state_reduction: Mapping[str, str] | None = None,
        accumulate_steps: int = 1,
        shard_optimizer: bool = False,
        logical_replicas: int | None = None,
        local_steps: LocalSteps | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        unused_parameters: str = "zero",
        skip_nonfinite: bool = False,
        loss_scale: float | str | None = None,
        eval_fn: LossFn | None = None,
        donate: bool = True,
    ) -> None:
        self.mesh = make_mesh(mesh, axis_name)
        axis, hardware = axis_of(self.mesh), platform(self.mesh)
        sync = Sync(axis, batch_norm_group_size, batch_norm_unbiased, logical_replicas)
        flax_model = functional(
            model, batch_norm, sync, per_replica, state_reduction, frozen, compute_dtype
        )
        sync.check(self.mesh.size, batch_norm)
        refuse_pairs(
            logical_replicas=logical_replicas,
            local_steps=local_steps,
            shard_optimizer=shard_optimizer,
            comm_hook=comm_hook,
            wire_dtype=wire_dtype,
            overlap=overlap is True,
        )
        chosen, overlaps = _settle_layout(layout, overlap, self.mesh, local_steps, logical_replicas)
        is_scaled = loss_scale is not None
        if logical_replicas is None:
            packed = choose_packing(
                chosen,
                comm_hook,
                hardware,
                on_network=is_of_several_processes(self.mesh),
                is_sharded=shard_optimizer,
            )
        else:
            packed = pack_rows(chosen, logical_replicas)
        sizes = bucket_sizes(bucket_mb)
        seen = unscaled if is_scaled else as_is
        reduction = make_reduction(axis, packed, sizes, wire_dtype, seen)
        sharded_by = reduction if shard_optimizer else None
        self.spec = Step(
            model=flax_model,
            eval_fn=eval_fn or loss_fn,
            backward=choose_backward(
                flax_model, loss_fn, accumulate_steps, overlaps=overlaps, is_scaled=is_scaled
            ),
            replicas=choose_replicas(axis, flax_model, logical_replicas, self.mesh.size),
            reduction=reduction,
            sync=local_steps or EveryStep(),
            clip=choose_clip(max_grad_norm),
            optimizer=choose_optimizer(optimizer, unused_parameters, sharded_by, accumulate_steps),
            average=choose_average(ema_decay),
            guard=choose_guard(loss_scale, skip_nonfinite, flax_model.keeps_own),
        )
        self._constants: PyTree = None
        self._executor = Executor(donate=donate, platform=hardware)
        self._evaluate = make_evaluate(self.spec, self.mesh)
        self.steps = CompiledSteps(self.spec, self.mesh, donate=donate)
        self._first, self._saves = InitialState(self.steps), Saves(self.steps)
        predict = functools.partial(make_predict, self.spec, self.mesh)
        self._predict = functools.lru_cache(maxsize=8)(predict)

    def __repr__(self) -> str:
        """The model, its devices, and the plan, once there is one."""
        head = f"DataParallel({self.steps})"
        return head if self.plan is None else f"{head}\n{self.plan}"

    @property
    def plan(self) -> BucketPlan | None:
        """The buckets of the last rows; None before `init`.

        Their order is that in which the traced backward pass finishes the gradients; a guess until
        a batch has been seen, which `init` of an NNX model does not need.
        """
        return self.steps.plan

    @property
    def latest(self) -> TrainState | None:
        """The newest state of `init` or `step`, also if an interrupt kept you from getting it."""
        return self._executor.latest

    def with_constants(self, constants: PyTree) -> "DataParallel":
        """Returns the same object, each call of which passes these constants to the loss.

        Args:
          constants: A tree of arrays, host or replicated. They are not differentiated, and other
            values of the same shapes trace and compile nothing.

        Raises:
          ConfigError: If neither `loss_fn` nor `eval_fn` names `constants`.
        """
        refuse_constants(self.spec.backward.loss_fn, self.spec.eval_fn)
        bound = copy.copy(self)
        bound._constants = replicate(constants, self.mesh)
        return bound

    def init(
        self,
        seed: int = 0,
        batch: Batch = None,
        params: Params = None,
        *,
        partial: bool = False,
        constants: PyTree = None,
    ) -> TrainState:
        """Makes the first state: the same on every device, from one seed.

        Args:
          seed: Seed of the base PRNG key: of parameters and of all later random numbers.
          batch: Example rows of this process, for their shapes (Linen).
          params: Values to start from: Linen variables or their "params", or an NNX state, which
            are copied; or a path to read them from: a .safetensors or .msgpack file, a run
            directory, a folder that orbax has written. Floating values of files take the model's
            dtypes.
          partial: Whether `params` may have other paths or shapes than the model, which then keeps
            its own values there; `loaded` reports each of them.
          constants: Constants of the loss, as in `step`.

        Raises:
          UsageError: If a Linen model has neither `batch` nor `params`, or `partial` no `batch`.
          ConfigError: If `params` does not fit the model.
        """
        inputs = self._inputs(as_arrays(batch), constants)
        self._executor.latest = state = self._first.make(seed, inputs, params, partial=partial)
        return state

    @property
    def loaded(self) -> Loaded | None:
        """Report on the last `init(params=...)`, array by array; None before one."""
        return self._first.loaded

    def _inputs(self, batch: Batch, constants: PyTree = None) -> Inputs:
        bound = self if constants is None else self.with_constants(constants)
        return Inputs(batch, bound._constants)

    def abstract_state(self, batch: Batch) -> TrainState:
        """Shapes, dtypes and shardings of the state, with nothing allocated.

        Args:
          batch: Rows of this process, or their shapes.
        """
        return self._first.shapes(self._inputs(batch))

    def trace(self, batch: Batch) -> jax.stages.Traced:
        """Traces the step for the shapes of `batch`, with nothing allocated, compiled or run.

        Args:
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
        """
        return self.steps.trace(self.abstract_state(batch), self._inputs(batch))

    def program(self, state: TrainState, batch: Batch, form: Form | None = None) -> Program:
        """Digests of model, loss and optimizer, of traces that a step makes anyway; runs nothing.

        Args:
          state: A state, for its shapes.
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
          form: Form of another program to compare with; by default that of these rows.
        """
        self.steps.check_rows(batch := as_arrays(batch))
        return self.steps.program(state, self._inputs(batch), form)

    def model(self, state: TrainState, params: str = "params") -> Any:
        """Returns copies: Linen variables, or an NNX module in eval mode.

        Args:
          state: State from `init` or `step`.
          params: "params", or "ema" for their moving average.
        """
        values = self._values(state, params)
        return self.spec.model.rebuild(*thaw(*jax.tree.map(copy_off_mesh, values)))

    def _refuse_foreign(self, state: TrainState, inputs: Inputs | None = None) -> None:
        """Refuses a state that a step has taken, or whose parameters are those of another model."""
        self._executor.refuse_taken(state)
        self._first.refuse_foreign(state, self._executor.latest, inputs)

    def _values(self, state: TrainState, params: str = "params") -> Values:
        """The chosen parameters and the other state, with the replicas' own averaged."""
        self._refuse_foreign(state)
        return self.steps.merged((chosen_params(state, params), state.model_state))

    def step(
        self, state: TrainState, batch: Batch, constants: PyTree = None
    ) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; returns at once, with results still being computed.

        Args:
          state: State from `init` or the step before; its memory is reused.
          batch: This process's rows, on the host or on devices. Where it is a dict with "mask",
            only entries with mask 1 count.
          constants: Argument of `loss_fn` of that name: never split, never differentiated.

        Returns:
          The new state, and global means: "loss", the metrics of `loss_fn`, "count" (the valid
          loss entries), "grad_norm" (before clipping; with `local_steps` the mean of the replicas'
          own) where `max_grad_norm` is set, "skipped" (all steps skipped so far) where
          `skip_nonfinite` is, and "loss_scale" (this step's) where that is dynamic.

        Raises:
          ConfigError: If the rows do not divide over the devices, or a shape is wrong.
          UsageError: If the state has already been given to a step.
        """
        inputs = self._inputs(self.shard_batch(batch), constants)
        self._refuse_foreign(state, inputs)
        return self._executor.send(self.steps.step_for(state, inputs), state, inputs)

    def gradients(
        self, state: TrainState, batch: Batch, constants: PyTree = None
    ) -> tuple[Grads, Metrics]:
        """Returns the gradients of a step; nothing is updated, and the state is not taken.

        Args:
          state: State from `init` or `step`.
          batch: This process's rows.
          constants: Constants of the loss, as in `step`.

        Returns:
          The gradient of the global mean loss, averaged over all replicas and not clipped, of the
          structure of `state.params`; and the metrics.
        """
        inputs = self._inputs(self.shard_batch(batch), constants)
        self._refuse_foreign(state, inputs)
        return run_compiled(self.steps.gradients_for(state, inputs), state, inputs)

    def shard_batch(self, batch: Batch) -> Batch:
        """Places this process's rows on its devices, as `step` does by itself.

        Raises:
          ConfigError: If the rows do not divide over the devices and `accumulate_steps`.
        """
        batch = as_arrays(batch)
        self.steps.check_rows(batch)
        return put_rows(batch, self.mesh)

    def pad(self, batch: Batch, num_rows: int | None = None) -> Batch:
        """Pads this process's rows until they divide, with copies of its last, whose mask is 0.

        A step of the result equals one device on the rows before, wherever the model treats rows
        alone: a batch norm sees the copies. Every process calls it, with any number of rows.

        Args:
          batch: A dict of arrays. Its "mask", if any, stays that of the rows.
          num_rows: Number of rows to pad to, such as that of full batches, for which the step is
            compiled; by default the next that divides, the same on every process.

        Returns:
          The batch, always with "mask", on the host.

        Raises:
          ConfigError: If the batch is no dict, or `num_rows` does not divide or is too small.
          UsageError: If rows are added, and the loss or a metric is a scalar, or a `jddp.Mean` of
            scalars: padding cannot be masked in it.
        """
        if not self.steps.sums:
            self.abstract_state(batch)  # which traces the loss
        return pad_for_step(batch, self.steps, num_rows)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Lowers the step for the shapes of `batch`, with nothing allocated or run.

        Args:
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
        """
        return self.steps.lower(self.abstract_state(batch), self._inputs(batch))

    def explain(self, batch: Batch) -> Explanation:
        """Compiles the step and reports what it sends, beside what was planned; runs nothing.

        Args:
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
        """
        return explain(self.steps, self.abstract_state(batch), self._inputs(batch))

    def memory(
        self, batch: Batch, *, accumulate_steps: int | None = None, autotune: bool = True
    ) -> Memory:
        """Compiles the step and reports what it needs of each device's memory; runs nothing.

        Args:
          batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
          accumulate_steps: Number of micro-batches of another step, to compare with.
          autotune: Whether the compiler may try kernels on GPUs, as for a step that runs.
        """
        state, inputs = self.abstract_state(batch), self._inputs(batch)
        lowered = self.steps.lower(state, inputs, accumulate_steps)
        return measure_memory(lowered, state, inputs.rows, self.mesh, autotune=autotune)

    def diagnose(self, state: TrainState, batch: Batch) -> Layers:
        """Measures parameters and gradients of the next step, layer by layer; changes nothing.

        Args:
          state: State from `init` or `step`.
          batch: This process's rows.

        Returns:
          For each parameter, by its path: "parameter" and "gradient", the norms of it and of its
          averaged gradient, and "not_finite", how many numbers of that gradient are not.
        """
        return diagnose(self._values(state)[0], self.gradients(state, batch)[0])

    def evaluate(
        self, state: TrainState, batches: Batches, params: str = "params", constants: PyTree = None
    ) -> Metrics:
        """Returns the exact means of loss and metrics over every example of `batches`.

        Every process gives the same number of batches, of any size, also empty: a partial batch is
        padded with rows that do not count.

        Args:
          state: State from `init` or `step`; it is not changed.
          batches: Batches of this process.
          params: "params", or "ema" for their moving average.
          constants: Constants of the loss, as in `step`.

        Returns:
          "loss", the metrics of the loss, results of each `jddp.Metric`, and "examples", the rows
          counted.

        Raises:
          UsageError: If there is a partial batch, and the loss or a metric is a scalar, or a
            `jddp.Mean` of scalars: padding cannot be masked in it.
        """
        run = self._run(self._evaluate, state, params, constants)
        return evaluate_exactly(run, batches, self.mesh, self.steps.num_local_replicas)

    def trace_evaluation(
        self, state: TrainState, batch: Batch, params: str = "params"
    ) -> list[str]:
        """Traces `evaluate` for such a batch, so that a mistake in it shows; runs nothing.

        Args:
          state: State from `init` or `step`; it is not changed.
          batch: Evaluation rows of this process.
          params: "params", or "ema" for their moving average.

        Returns:
          The names of what `evaluate` returns.
        """
        trace = self._run(functools.partial(jax.eval_shape, self._evaluate), state, params)
        return [*next(sums_of(trace, [batch], self.mesh, self.steps.num_local_replicas))]

    def predict(
        self,
        state: TrainState,
        batches: Batches,
        function: LossFn = outputs,
        params: str = "params",
        constants: PyTree = None,
    ) -> PyTree:
        """Returns the model's outputs for each row of `batches`, in their order.

        Args:
          state: State from `init` or `step`; it is not changed.
          batches: Batches of this process, of any size; as many on every process.
          function: Function `function(model, batch)` that returns a tree of arrays, a row for each
            of the batch; by default the model's outputs for "image", "tokens" or "x". The same
            function is compiled once; a new one, such as a lambda that is written again, is
            compiled again.
          params: "params", or "ema" for their moving average.
          constants: Constants of the loss, as in `step`.

        Returns:
          The tree, of numpy arrays, for this process's rows.

        Raises:
          ConfigError: If the function returns an array that has no row for each of the batch.
        """
        run = self._run(self._predict(function), state, params, constants)
        return predict_rows(run, batches, self.mesh)

    def _run(
        self, compiled: Any, state: TrainState, params: str, constants: PyTree = None
    ) -> Callable[[Batch, Any], Any]:
        """Returns `run(rows, valid)`, which calls a compiled function with a state's values."""
        values, inputs = self._values(state, params), self._inputs(None, constants)
        return numbered(compiled, state.key, values, inputs)

    def save(
        self, directory: str | Path, state: TrainState, extra: Any = None, *, keep: int = 3
    ) -> Checkpoints:
        """Saves a state in a loop of your own, as `fit` does; returns once it is copied.

        Every process calls it. Writing continues in the background, and ends before the next save
        begins or the process ends; a process that is killed meanwhile leaves the checkpoint before.
        What the file system refuses is logged, and loses only that checkpoint. What was saved last,
        the same state and `extra`, is not written again; another state of its step replaces it.

        Args:
          directory: Directory of the checkpoints of this training alone, on a file system that all
            processes share; made if it is missing.
          state: State from `init`, `step` or `restore`; the next step may take it.
          extra: Values that `restore` returns beside the state, as JSON: a position in the data,
            metrics, None. Tuples come back as lists, keys of dicts as strings.
          keep: Number of newest checkpoints that stay.

        Returns:
          An object whose `wait()` returns once all is written, and raises a `FileSystemError` if
          the last state could not be: call it after the last save.

        Raises:
          ConfigError: If `extra` is no JSON; if the directory is of a run of `fit`, or holds
            checkpoints that were not restored first, or of later steps.
          FileSystemError: If the directory cannot be made or written.
          NumericsError: If the state is not finite.
          ReplicaMismatchError: At the next call, if state differs that must be the same on all
            replicas.
          UsageError: If a step has taken the state, or it is of another model.
        """
        self._refuse_foreign(state)
        return self._saves.save(directory, state, extra, keep)

    def restore(self, directory: str | Path) -> tuple[TrainState, Any] | None:
        """Returns the newest undamaged state of a directory, and its `extra` values.

        Every process calls it, after `init`. The state may be of another number of devices or
        processes, and its optimizer sharded or not. Nothing is written, so that another process may
        be saving there; but a damaged checkpoint is renamed, and the one before is read.

        Args:
          directory: A directory of `save`, or the run directory of `fit`, whose checkpoints have
            their run data in place of extra values.

        Returns:
          The state and the extra values; None where there is no checkpoint.

        Raises:
          UsageError: If there was no `init`, which gives the form of the state.
          ConfigError: If the state is of another model or optimizer, with the paths that differ.
          FileSystemError: If there are checkpoints, but none is undamaged and readable.
        """
        if (found := self._saves.restore(directory, self.latest)) is not None:
            self._executor.latest = found[0]
        return found

    @refuses_unknown("fit", OF_FIT)
    def fit(
        self,
        batches: Batches | None = None,
        *,
        data: Any = None,
        global_batch_size: int | None = None,
        num_epochs: float | None = None,
        num_steps: int | None = None,
        state: TrainState | Callable[[Batch], TrainState] | None = None,
        evaluate: Batches | Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        log_every_steps: int = 50,
        eval_every_steps: int | None = None,
        save_every_steps: int | None = None,
        keep: int = 3,
        keep_every_steps: int | None = None,
        resume: str = "auto",
        eval_params: str = "params",
        learning_rate: Callable[[int], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        manifest: Mapping[str, Any] | None = None,
        limits: Limits = LIMITS,
        check_replicas_every_steps: int | None = 500,
        max_consecutive_skips: int = 10,
        same_batches: bool = False,
    ) -> Run:
        """Trains for `num_steps`, with evaluation, progress, metrics and checkpoints.

        Args:
          batches: This process's training batches. An object with `get_state` and `set_state`
            resumes where it was; any other iterable is fast-forwarded.
          data: Instead of batches, a dict of arrays with a row for each example, or a data set of
            such, the same on every process; `seed` is that of their order too. For other options
            give `jddp.data.TrainBatches` as batches.
          global_batch_size: Examples per step, over all processes, of `data`.
          num_epochs: Number of passes over `data`; the last batch may be partial and is padded. A
            run that resumes ends with their last example, too.
          num_steps: Optimizer steps in all, those of a resumed run included; with `data` either
            these or epochs.
          state: The state to start from, which is copied, so that it stays yours, with
            `run.evaluate()` of an earlier run: the devices hold both as long as you keep it. A
            function of the first batch that makes the state holds but one. By default
            `init(seed, <the first batch>)`.
          evaluate: This process's evaluation batches, iterated from the beginning each time; or a
            dict of arrays, the same on every process.
          run_dir: Directory for metrics and checkpoints, or its URL, such as "s3://bucket/run",
            for which fsspec needs `jddp[s3]` or the like; None keeps nothing.
          callbacks: Objects as `jddp.Callback` describes them.
          seed: Seed of the first state's PRNG key.
          log_every_steps: Steps between train records.
          eval_every_steps: Steps between evaluations; None is once, at the end.
          save_every_steps: Steps between checkpoints; None is once, at the end.
          keep: Number of newest checkpoints that stay.
          keep_every_steps: Number of steps at whose multiples checkpoints stay too.
          resume: "auto" (resume if there is a checkpoint), "never" (there must be none), "must", or
            "changed" (as "auto", also with another model, loss or optimizer than the run's).
          eval_params: Parameters to evaluate, "params" or "ema".
          learning_rate: Learning rate of a step, for the records.
          config: Settings kept in the run directory; a directory with other ones is refused.
          manifest: Facts kept beside them.
          limits: Seconds that a phase may take before its processes are reported as hanging.
          check_replicas_every_steps: Steps between comparisons of all replicas; None for no
            comparison.
          max_consecutive_skips: Number of steps in a row which `skip_nonfinite` leaves out that
            end the run.
          same_batches: Whether all processes are given the same rows on purpose, as in a benchmark.
            Otherwise a first batch that several have is refused: of `jddp.data.TrainBatches` and
            `eval_batches` each reads its own rows.

        Returns:
          The finished run: its state, its metrics, its directory.

        Raises:
          ConfigError: If an option is unknown or breaks its rule, or the run directory holds
            another run, or is in use.
          UsageError: If batches are padded, and the loss or a metric is a scalar, or a `jddp.Mean`
            of scalars; or if a step has taken the state.
          DataError: If the batches end before `num_steps`.
          ProcessMismatchError: If processes have different models, optimizers, batches or
            arguments, or the same rows.
          ReplicaMismatchError: If state differs that must be the same on all replicas.
          OutOfMemoryError: If a device has less memory than a step needs.
          NumericsError: If the loss is not finite, or too many steps in a row were skipped.
        """
        sizes = {"global_batch_size": global_batch_size, "num_epochs": num_epochs, "seed": seed}
        batches, evaluate, length = choose_batches(
            batches, data, evaluate, num_steps, multiple_of=self.steps.num_micro_batches, **sizes
        )
        if state is not None and not callable(state):
            self._executor.refuse_taken(state)
        plan = Plan(
            **length,
            log_every_steps=log_every_steps,
            eval_every_steps=eval_every_steps,
            save_every_steps=save_every_steps,
            keep=keep,
            keep_every_steps=keep_every_steps,
            resume=resume,
            evaluation=evaluate,
            eval_params=eval_params,
            learning_rate=learning_rate,
            check_replicas_every_steps=check_replicas_every_steps,
            max_consecutive_skips=max_consecutive_skips,
            same_batches=same_batches,
        )
        kept = Kept.of(run_dir, config, manifest)
        return train(self, batches, plan, kept, state, callbacks, limits)


def _settle_layout(
    layout: str, overlap: bool | str, mesh: Mesh, local: LocalSteps | None, logical: int | None
) -> tuple[Layout, bool]:
    """Layout and overlap; there is nothing to overlap where a step sends no gradients."""
    # Under local steps the program, which holds steps with and without a mean, would hold the
    # backward pass twice.
    is_alone = mesh.size == 1 or local is not None or logical is not None
    never_sends = local is not None and not local.start
    if (overlap == "auto" and is_alone) or (overlap is True and never_sends):
        overlap = False
    return choose_layout(layout, overlap, lambda: platform(mesh))
