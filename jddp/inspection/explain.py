"""Describes what a step sends: the plan, and the collectives of its compiled program.

    print(ddp.explain(batch))      # text in a terminal, HTML in a notebook
    ddp.stats()                    # DDP's logging data, as a dict

This module reads plans and programs; it times the reduction without the rest of the step.
"""

import dataclasses
import functools
import re
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax

from jddp.engine.compiled import CompiledSteps
from jddp.engine.executor import Executor
from jddp.engine.mesh import over_replicas, platform
from jddp.engine.state import Inputs, TrainState, enter
from jddp.engine.sync import LocalSteps
from jddp.errors import UsageError
from jddp.html import Shown
from jddp.inspection.collectives import Collective, collectives
from jddp.inspection.hlo import read_program
from jddp.reduce.average import compiler_options
from jddp.reduce.gradients import Finished
from jddp.reduce.plan import BucketPlan, in_mebibytes

GRADIENTS, PARAMETERS = "gradients", "parameters, in outer steps"
SENT = (GRADIENTS, PARAMETERS)


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The communication of a compiled step; `str` of it is made for a terminal of 80 columns.

    Attributes:
      plan: The buckets.
      num_devices: Number of devices on which the step runs.
      platform: Their hardware.
      compiled: The collectives of the compiled program, in its order.
      local_steps: How often replicas synchronize, if not in each step.
    """

    plan: BucketPlan
    num_devices: int
    platform: str
    compiled: tuple[Collective, ...]
    local_steps: LocalSteps | None = None

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a step sends on average; under `local_steps` after the plain first ones.

        Each array counts once, whatever the algorithm of the network.
        """
        return sum(x.bytes * self._runs(x) for x in self.compiled)

    def _runs(self, collective: Collective) -> float:
        if self.local_steps is not None and (purpose := _purpose(collective)) in SENT:
            return 1 / self.local_steps.every if purpose == PARAMETERS else 0
        return collective.num_runs or 1

    def __repr__(self) -> str:
        """The plan, the compiled collectives, and a summary."""
        rows: dict[tuple[str, ...], list[Collective]] = {}
        for x in self.compiled:
            row = ",".join(x.dtypes), x.op, "yes" if x.is_async else "no", _purpose(x)
            rows.setdefault(row, []).append(x)
        lines = [
            str(self.plan),
            "",
            f"compiled for {self.num_devices} {self.platform} devices, jax {jax.__version__}",
            f"{'number':>6} {'MiB':>9}  {'dtype':<6} {'collective':<14} {'async':<5}  for",
        ]
        for (*columns, purpose), found in rows.items():
            size = in_mebibytes(sum(x.bytes for x in found))
            kind = "{:<6} {:<14} {:<5}".format(*columns)
            lines.append(f"{len(found):>6} {size:>9}  {kind}  {purpose}")
        return "\n".join([*lines, "", *self._sentences()])

    def _sentences(self) -> list[str]:
        local, wire = self.local_steps, in_mebibytes(self.plan.wire_bytes)
        ring = in_mebibytes(2 * (self.num_devices - 1) / self.num_devices * self.plan.wire_bytes)
        moves = f"{wire} MiB; a ring of {self.num_devices} devices moves"
        into = f"{ring} MiB into and out of each."
        if local is None:
            return [f"Gradients of an optimizer step are {moves}", into]
        plain = f"Each of the first {local.start} steps sends gradients, as many bytes."
        return [
            *[plain] * bool(local.start),
            f"Replicas synchronize every {local.every} steps. Differences of parameters then are",
            f"{moves} {into}",
            "Each array counted once, all collectives are "
            f"{in_mebibytes(self.bytes_per_step)} MiB a step on average.",
        ]


def explain(steps: CompiledSteps, state: TrainState, inputs: Inputs) -> Explanation:
    """Compiles the step for a state and rows, or their shapes, and reads what it sends."""
    lowered, sync = steps.lower(state, inputs), steps.spec.sync
    return Explanation(
        plan=steps.sent(state),
        num_devices=steps.mesh.size,
        platform=platform(steps.mesh),
        compiled=collectives(read_program(lowered.compile().as_text() or "")),
        local_steps=sync if isinstance(sync, LocalSteps) else None,
    )


def _purpose(collective: Collective) -> str:
    """The purpose of a collective, from the name scopes of the step."""
    if "outer_step/" in collective.op_name:
        return PARAMETERS
    if re.search(r"\bbucket_\d+/", collective.op_name):
        return GRADIENTS
    if "parameters/" in collective.op_name:
        return "parameters, updated"
    if "metrics/" in collective.op_name:
        # XLA merges collectives of one kind: here a layer's sums with those of the loss.
        is_joined = "transpose(" in collective.op_name or "BatchNorm" in collective.op_name
        return f"metrics; the model, {_direction(collective)}" if is_joined else "loss and metrics"
    return f"the model, {_direction(collective)}"


def _direction(collective: Collective) -> str:
    return "backward" if "transpose(" in collective.op_name else "forward"


def logging_data(steps: CompiledSteps, executor: Executor) -> dict[str, Any]:
    """The fields of DDP's `_get_ddp_logging_data`, under its names where they mean the same.

    Raises:
      UsageError: If nothing has been planned yet.
    """
    spec, plan, mesh = steps.spec, steps.plan, steps.mesh
    if plan is None:
        raise UsageError("stats needs a plan, which init makes. Call init first.")
    return {
        "world_size": mesh.size,
        "rank": jax.process_index(),
        "backend_name": platform(mesh),
        "iteration": executor.num_calls,
        "num_parameter_tensors": sum(len(b.leaves) for b in plan.buckets) + len(plan.unused),
        "dtypes": ", ".join(sorted({bucket.dtype.name for bucket in plan.buckets})),
        "wire_dtypes": ", ".join(sorted({bucket.wire_dtype.name for bucket in plan.buckets})),
        "wire_bytes": plan.wire_bytes,
        "num_buckets_reduced": len(plan),
        "bucket_sizes": [bucket.bytes for bucket in plan.buckets],
        "initial_bucket_size_limits": list(spec.reduction.bucket_bytes),
        "layout": spec.reduction.packing.layout,
        "overlap": spec.backward.overlaps,
        "comm_hook": spec.reduction.hook_name,
        "accumulate_steps": spec.backward.num,
        "local_steps": getattr(spec.sync, "every", None),
        "batch_norm": spec.model.batch_norm,
        "unused_parameters": list(plan.unused),
        "avg_step_seconds": executor.mean_seconds,
    }


def measure(steps: CompiledSteps, state: TrainState, inputs: Inputs) -> dict[str, Any]:
    """Counts the collectives of a compiled step, and times its reduction.

    Args:
      steps: Steps that have planned.
      state: State of the step, or its shapes.
      inputs: Inputs of the step, or their shapes.
    """
    compiled, spec = explain(steps, state, inputs).compiled, steps.spec
    reduction, plan, mesh = spec.reduction, steps.plan, steps.mesh
    assert plan is not None
    params = jax.eval_shape(functools.partial(enter, layouts=steps.layouts(state)), state).params

    def replica() -> Any:
        # Different values on each replica, or the compiler would compute the mean in advance.
        own = lax.axis_index(spec.axis)
        grads = jax.tree.map(lambda x: (jnp.zeros(x.shape) + own).astype(x.dtype), params)
        return reduction(Finished(grads), reduction.hook.init(plan), plan)[0]

    options = compiler_options(reduction, platform(mesh))
    run = jax.jit(over_replicas(replica, mesh, (), P()), compiler_options=options)
    num_collectives = sum(x.num_runs or 1 for x in compiled)
    return {"num_collectives": num_collectives, "reduce_seconds": median_seconds(run, 6)}


def median_seconds(run: Callable[[], Any], num_runs: int) -> float:
    """The median time of a computation, without the first run, which may compile."""
    _, *seconds = timeit.repeat(lambda: jax.block_until_ready(run()), repeat=num_runs, number=1)
    return statistics.median(seconds)
