"""`jddp.DataParallel`: a model, an optimizer and a loss, replicated over a mesh.

    ddp = jddp.DataParallel(model, optax.adamw(1e-3), loss_fn)
    state = ddp.init(seed=0, batch=example_batch)
    state, metrics = ddp.step(state, batch)      # batch: this process's rows
    metrics = ddp.evaluate(state, batches)       # exact over every example

`Executor` sends steps. A step reuses the memory of the state that it is given: the executor keeps
the newest state, names the call that took an old one, and delays Ctrl-C until the new one is kept.

This module checks the user's options, and places batches. The step itself is defined in
`engine.step`; `engine.compiled` plans and compiles it for rows of one form. Training, saving and
reports are functions of their own rooms: `jddp.fit(ddp, ...)`, `jddp.Checkpoints`, `jddp.explain`.
"""

import collections
import contextlib
import copy
import functools
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import optax

from jddp.config.options import (
    BatchNormConfig,
    Precision,
    PrecisionConfig,
    Reduction,
    SyncBatchNorm,
)
from jddp.distributed.coordination import refuse_unjoined
from jddp.engine import evaluation
from jddp.engine.calls import run_compiled
from jddp.engine.compiled import Call, CompiledSteps, Maker
from jddp.engine.guard import Average, Clip, choose_guard
from jddp.engine.initial_state import Loaded, make_first, make_init
from jddp.engine.mesh import HostOrDevice, copy_off_mesh, make_mesh, platform
from jddp.engine.micro_batches import MicroBatches
from jddp.engine.optimizer import choose_optimizer
from jddp.engine.planned import Planned
from jddp.engine.state import TrainState, Values
from jddp.engine.step import Step, make_gradients, make_step
from jddp.engine.strategy import Strategy, choose_reducer, choose_strategy
from jddp.ground.names import refuses_unknown, tool
from jddp.ground.names.synonyms import OF_DATA_PARALLEL
from jddp.ground.typing import Batch, Batches, Grads, LossFn, Metrics, Params, PyTree, Shown
from jddp.modules.base import Frozen, outputs, thaw
from jddp.modules.batch_norm import Sync
from jddp.modules.functional import functional
from jddp.modules.rows import as_arrays
from jddp.reduce.plan import BucketPlan


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
      mesh: A mesh of one axis, devices, a number of them, or None for all. The name of the axis, by
        default "data", is for models and losses that use one, such as `lax.pmean(x, "batch")`.
      strategy: "ddp" (replicas are equal and average gradients in each step), "zero1" (the same,
        and each replica keeps a shard of the optimizer's state), "fsdp" (each replica keeps a part
        of the parameters too) or a `jddp.FSDP`, a `jddp.LogicalReplicas`
        (results are bitwise identical on any number of devices), or a `jddp.LocalSteps` (replicas
        take steps alone, and average parameters now and then).
      reduction: Form in which gradients are averaged: "bfloat16" or "float16" on the wire, or a
        `jddp.Reduction` with sizes of buckets, overlap, or a communication hook.
      batch_norm: Statistics that batch norm uses: "sync" (of the global batch), "broadcast" (of
        replica 0; with a mask, of the first replica with a valid row in the micro-batch)
        or "local" (each replica its own, averaged when evaluated or read); or a
        `jddp.SyncBatchNorm`, for groups of replicas. Axis names of the layers are ignored.
      precision: "bfloat16" or "float16" for the model's arithmetic, the second with a dynamic loss
        scale; or a `jddp.Precision`.
      state: Rules for other state than parameters that depends on a replica's rows or random
        numbers, by name of its collection (Linen) or class of variables (NNX): "mean", "sum" (of
        the replicas' additions, exact for whole numbers) or "first" (replica 0's) in each step; or
        "per_replica": each keeps its own, which is neither synchronized nor compared, and is
        averaged when evaluated or read, whole numbers rounded down. Such state is refused without a
        rule, unless a batch norm keeps it; equal state is left as it is.
      frozen: Parameters that are not trained: regular expressions for whole paths, such as
        "backbone/.*", or a function of a path. They are not differentiated, sent or updated, and
        have no optimizer state; they stand in `state.model_state["params"]`.
      accumulate_steps: Number of micro-batches into which each replica's rows are split, run one
        after the other, with one reduction for all.
      max_grad_norm: Global norm to which the averaged gradient is clipped; with `LocalSteps`, each
        replica clips its own.
      ema_decay: Decay of `ema_params`, a moving average of the parameters, and of `ema_state`,
        other floating values, such as batch statistics; None for none.
      unused_parameters: Treatment of parameters that no gradient reaches: "zero" (the optimizer
        gets zeros), "skip" (it leaves them alone), "error" (they are refused, by name).
      skip_nonfinite: Whether a step is skipped, which changes nothing but counts, if its loss or
        gradients are not finite, or it would make other state so.
      eval_fn: The loss for evaluation; by default `loss_fn` with `train=False`.
      donate: Whether `step` reuses the memory of the state that it is given.

    Raises:
      ConfigError: If an option breaks its rule.
      UsageError: If a launcher has started several processes, and this one has not joined them.

    Attributes:
      mesh: The mesh of devices.
      steps: The step before it runs: its parts, rows, plans, traces and programs.
      loaded: Report on the last `init(params=...)`, array by array; None before one.
    """

    loaded: Loaded | None = None

    @refuses_unknown("DataParallel", OF_DATA_PARALLEL)
    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        loss_fn: LossFn,
        *,
        mesh: jax.sharding.Mesh | Sequence[jax.Device] | int | None = None,
        strategy: str | Strategy = "ddp",
        reduction: str | Reduction | None = None,
        batch_norm: str | SyncBatchNorm = "sync",
        precision: str | Precision | None = None,
        state: Mapping[str, str] | None = None,
        frozen: Frozen = (),
        accumulate_steps: int = 1,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        unused_parameters: str = "zero",
        skip_nonfinite: bool = False,
        eval_fn: LossFn | None = None,
        donate: bool = True,
    ) -> None:
        options = {name: given for name, given in locals().items() if name != "self"}
        refuse_unjoined()
        self.mesh = make_mesh(mesh)
        parts = choose_strategy(strategy)
        sent = Reduction.chosen(reduction, "reduction")
        statistics = BatchNormConfig.chosen(batch_norm, "batch_norm")
        arithmetic = PrecisionConfig.chosen(precision, "precision")
        is_scaled = arithmetic.loss_scale is not None
        reducer, overlaps = choose_reducer(
            sent, parts, statistics.name, self.mesh, is_scaled=is_scaled
        )
        placement = parts.placement(reducer, self.mesh)
        sync = Sync(reducer.axis, statistics.group_size, statistics.unbiased, parts.number)
        sync.check(self.mesh.size)
        flax_model = functional(
            model, statistics.name, sync, state, frozen, arithmetic.compute_dtype
        )
        spec = Step(
            model=flax_model,
            eval_fn=eval_fn or loss_fn,
            backward=MicroBatches(flax_model, loss_fn, accumulate_steps, overlaps, is_scaled),
            replicas=parts.replicas(reducer.axis, flax_model),
            reducer=reducer,
            sync=parts.sync,
            clip=Clip(max_grad_norm),
            optimizer=choose_optimizer(
                optimizer,
                unused_parameters,
                placement,
                self.mesh.size,
                reducer if parts.shards_optimizer else None,
            ),
            placement=placement,
            average=Average(ema_decay),
            guard=choose_guard(arithmetic.loss_scale, skip_nonfinite, flax_model.keeps_own),
        )
        self._executor = Executor(donate=donate, platform=platform(self.mesh))
        self._evaluate = evaluation.make_evaluate(spec, self.mesh)
        self.steps = CompiledSteps(
            spec,
            self.mesh,
            init=make_init(spec, self.mesh),
            donate=donate,
            remake=lambda other: DataParallel(**options | {"mesh": other}).steps,
        )
        predict = functools.partial(evaluation.make_predict, spec, self.mesh)
        self._predict = functools.lru_cache(maxsize=8)(predict)

    def __repr__(self) -> str:
        """The model, its devices, and the plan, once there is one."""
        head = f"DataParallel({self.steps})"
        return head if self.plan is None else f"{head}\n{self.plan}"

    @property
    def plan(self) -> BucketPlan | None:
        """The buckets of the rows of the last `init` or `step`; None before `init`.

        They stand in the order in which the traced backward pass finishes the gradients. The order
        is a guess until a batch has been seen, which `init` of an NNX model does not need.
        """
        planned = self._executor.planned
        return None if planned is None else planned.plan

    @property
    def latest(self) -> TrainState | None:
        """The newest state of `init` or `step`, also if an interrupt kept you from getting it."""
        return self._executor.latest

    @latest.setter
    def latest(self, state: TrainState | None) -> None:
        self._executor.latest = state

    def with_constants(self, constants: PyTree) -> "DataParallel":
        """Returns the same object; each of its calls passes these constants to the loss.

        Args:
          constants: A tree of arrays, host or replicated. They are not differentiated, and other
            values of the same shapes trace and compile nothing.

        Raises:
          ConfigError: If neither `loss_fn` nor `eval_fn` names `constants`.
        """
        bound = copy.copy(self)
        bound.steps = self.steps.with_constants(constants)
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
            are copied; or a path to read them from: a .safetensors or .pt file, a run
            directory or a folder of the Hugging Face Hub. Floating values of files take the
            model's dtypes.
          partial: Whether `params` may have other paths or shapes than the model, which then keeps
            its own values there; `loaded` reports each of them.
          constants: Constants of the loss, as in `step`.

        Raises:
          UsageError: If a Linen model has neither `batch` nor `params`, or `partial` no `batch`.
          ConfigError: If `params` does not fit the model.
        """
        inputs = self.steps.inputs(as_arrays(batch), constants)
        is_path = isinstance(params, str | Path)
        if is_path:
            params = tool("weights", "init(params=PATH)", "jddp.checkpoint")(params)
        state, planned, loaded = make_first(
            self.steps, seed, inputs, params, partial=partial, casts=is_path
        )
        self._executor.latest, self._executor.planned = state, planned
        self.loaded = loaded or self.loaded
        return state

    def model(self, state: TrainState, params: str = "params") -> Any:
        """Returns copies: Linen variables, or an NNX module in eval mode.

        Args:
          state: State from `init` or `step`.
          params: "params", or "ema" for their moving average.
        """
        values = self._values(state, params)
        return self.steps.spec.model.rebuild(*thaw(*jax.tree.map(copy_off_mesh, values)))

    def check(self, state: TrainState) -> None:
        """Refuses a state that a step has taken, or that belongs to another model.

        Raises:
          UsageError: If it is such a state, or lies on other devices.
        """
        self.steps.check(state, self._executor.latest)

    def _values(self, state: TrainState, params: str = "params") -> Values:
        """The chosen parameters and the other state, with the replicas' own averaged."""
        self.check(state)
        return evaluation.evaluated_values(state, params, self.steps.merged)

    def step(
        self,
        state: TrainState,
        batch: Batch,
        constants: PyTree = None,
        *,
        loss_limit: float | None = None,
        make: Maker = make_step,
    ) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; returns at once, with results still being computed.

        Args:
          state: State from `init` or the step before; its memory is reused.
          batch: This process's rows, on the host or on devices. Where it is a dict with "mask",
            only entries with mask 1 count.
          constants: Argument of `loss_fn` of that name: never split, never differentiated.
          loss_limit: Loss of the global batch above which the step changes nothing but counts, and
            is counted in "skipped"; the same on every process. Other limits compile nothing again.
          make: Function that makes the program. With `jddp.engine.replay.ReplayedStep` gradients
            are computed on two devices each and compared before the update; the call waits for it.

        Returns:
          The new state, and global means: "loss", the metrics of `loss_fn`, "count" (the valid
          loss entries), "grad_norm" (before clipping; with `LocalSteps` the mean of the replicas'
          own) where `max_grad_norm` is set, "skipped" (all steps skipped so far) where
          `skip_nonfinite` or `loss_limit` is, and "loss_scale" (this step's) where that is dynamic.

        Raises:
          ConfigError: If the rows do not divide over the devices, or a shape is wrong.
          UsageError: If the state has already been given to a step.
          ReplicaMismatchError: If a replayed step differs, with the device that is wrong.
        """
        latest = self._executor.latest
        call = self.steps.step_for(
            state, batch, constants, latest=latest, loss_limit=loss_limit, make=make
        )
        return self._executor.send(call)

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
        latest = self._executor.latest
        call = self.steps.step_for(state, batch, constants, latest=latest, make=make_gradients)
        return run_compiled(call.run, call.state, call.inputs)

    def shard_batch(self, batch: Batch) -> Batch:
        """Places this process's rows on its devices, as `step` does by itself.

        Raises:
          ConfigError: If the rows do not divide over the devices and `accumulate_steps`.
        """
        return self.steps.placed(batch)

    def pad(self, batch: Batch, num_rows: int | None = None) -> Batch:
        """Pads this process's rows until they divide, with copies of its last, whose mask is 0.

        A step of the result equals one device on the rows before, wherever the model treats rows
        alone: a batch norm sees the copies. Every process calls it, with any number of rows.

        Args:
          batch: A dict of arrays. Its "mask", if any, keeps masking the rows.
          num_rows: Number of rows to pad to, such as a full batch's, for which the step is
            compiled; by default the next that divides, the same on every process.

        Returns:
          The batch, always with "mask", on the host.

        Raises:
          ConfigError: If the batch is no dict, or `num_rows` does not divide or is too small.
          UsageError: If rows are added, and the loss or a metric is a scalar, or a `jddp.Mean` of
            scalars: padding cannot be masked in it.
        """
        planned, batch = self._executor.planned, as_arrays(batch)
        # The sums of the last planned rows; without a plan, the loss is traced for these rows.
        sums = (planned and planned.sums) or self.steps.planned(batch).sums
        return evaluation.pad_for_step(batch, self.steps.rows, sums, num_rows)

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
        return evaluation.evaluate_exactly(
            run, batches, self.mesh, self.steps.rows.num_local_replicas
        )

    def trace_evaluation(
        self, state: TrainState, batch: Batch, params: str = "params"
    ) -> list[str]:
        """Traces `evaluate` for such a batch, so that a mistake in it shows; runs nothing.

        Args:
          state: State from `init` or `step`; it is not changed.
          batch: Evaluation rows of this process.
          params: "params", or "ema" for their moving average.

        Returns:
          The names of the metrics that `evaluate` returns.
        """
        trace = self._run(functools.partial(jax.eval_shape, self._evaluate), state, params)
        return [
            *next(evaluation.sums_of(trace, [batch], self.mesh, self.steps.rows.num_local_replicas))
        ]

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
        return evaluation.predict_rows(run, batches, self.mesh)

    def _run(
        self, compiled: Callable[..., Any], state: TrainState, params: str, constants: PyTree = None
    ) -> Callable[[Batch, HostOrDevice], Any]:
        """Returns `run(rows, valid)`, which calls a compiled function with a state's values."""
        values, key = self._values(state, params), state.key
        inputs, numbers = self.steps.inputs(None, constants), map(np.uint32, itertools.count())

        def run(rows: Batch, valid: HostOrDevice) -> PyTree:
            given = inputs._replace(rows=rows)
            return run_compiled(compiled, key, values, next(numbers), given, valid)

        return run


Stepped = tuple[TrainState, Metrics]


class Executor:
    """Sends steps, and keeps the newest state.

    Args:
      donate: Whether a step takes the memory of the state that it is given.
      platform: The hardware.

    Attributes:
      latest: The newest state that is whole; None before there is one.
      planned: The plan of the rows that it was made with; None before there are some.
    """

    def __init__(self, *, donate: bool, platform: str) -> None:
        self.latest: TrainState | None = None
        self.planned: Planned | None = None
        self._num_calls = 0
        self._donate = donate
        self._platform = platform
        self._in_flight: collections.deque[Metrics] = collections.deque()

    def send(self, step: Call) -> Stepped:
        """Sends a step; returns its result, which need not be computed yet."""
        self._num_calls += 1
        self.planned = step.planned
        with _interrupts_after(step.state):
            result = run_compiled(step.run, step.state, step.inputs)
            self.latest = result[0]
        if self._donate:
            object.__setattr__(step.state, "_taken_by", self._num_calls)
        if self._platform == "cpu":
            self._wait_for_room(result[1])
        return result

    def _wait_for_room(self, metrics: Metrics) -> None:
        # XLA:CPU deadlocks in its rendezvous once some thirty programs of many devices are waiting
        # (measured on jax 0.10.2). An unbounded loop of steps gets there.
        self._in_flight.append(metrics)
        if len(self._in_flight) > 4:
            jax.block_until_ready(self._in_flight.popleft())


@contextlib.contextmanager
def _interrupts_after(state: TrainState) -> Iterator[None]:
    """Delays Ctrl-C from where a step has taken the state to where its result is kept.

    While the step is traced and compiled nothing is lost, and it is delivered at once.
    """
    handle, waiting = signal.getsignal(signal.SIGINT), []
    if not callable(handle) or threading.current_thread() is not threading.main_thread():
        yield  # No Python handler runs in this thread.
        return

    def note(number: int, frame: FrameType | None) -> None:
        if state.step.is_deleted():
            waiting.append((number, frame))
        else:
            handle(number, frame)

    # A handler, and not a signal mask: a masked signal may be delivered to another thread.
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handle)
        if waiting:
            handle(*waiting[0])
