"""Checks the promise for your model: a step on N devices equals one device on the whole batch.

    report = jddp.verify(model, optimizer, loss_fn, batch)
    print(report)
    assert report.passed

One step is taken twice from the same state: over the mesh, and on one of its devices. Random
numbers differ between replicas by design, so a model that uses some is compared with one device
that runs the N replica batches side by side, with the N keys.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jddp.engine.data_parallel import DataParallel
from jddp.engine.mesh import mapped_over, platform
from jddp.engine.state import Divided, Inputs, Layout, Replicated, Sharded, TrainState
from jddp.engine.step import replica_gradients, replica_step
from jddp.engine.strategy import FSDP
from jddp.ground.errors import UsageError
from jddp.ground.jaxprs import coarse_products, dtypes
from jddp.ground.typing import Batch, Grads, LossFn, Metrics, ModelState, Params, PyTree
from jddp.inspection.verification import findings
from jddp.inspection.verification.findings import Comparison, Verification
from jddp.modules.metrics import weights_in
from jddp.modules.rows import as_arrays, count_rows, split_rows


def side_by_side(
    ddp: DataParallel, state: TrainState, batch: Batch, constants: PyTree
) -> tuple[Grads, TrainState, Metrics]:
    """Takes the step of all replicas of `ddp` on its first device.

    Args:
      ddp: Model of many replicas.
      state: A state of these replicas; it is not changed.
      batch: Rows that divide over the devices.
      constants: Constants of the step.

    Returns:
      The averaged gradients, the new state, and the metrics.
    """
    spec, plan = ddp.steps.spec, ddp.steps.planned(batch).plan
    layouts = ddp.steps.layouts(state)
    axes = jax.tree.map(lambda layout: None if layout == Replicated() else 0, layouts)
    spec = spec.placed(layouts.params)

    def replica(state: TrainState, inputs: Inputs) -> tuple[Grads, TrainState, Metrics]:
        grads, _ = replica_gradients(spec, plan, state, inputs)
        return grads, *replica_step(spec, plan, state, inputs)

    split = functools.partial(split_rows, num=ddp.mesh.size)

    def rows(x: jax.Array, layout: Layout) -> jax.Array:
        if isinstance(layout, Divided):
            return jnp.stack(jnp.split(x, ddp.mesh.size, axis=layout.dim))
        return split(x) if isinstance(layout, Sharded) else x

    state = jax.tree.map(rows, state, layouts)
    given = jax.device_put((state, Inputs(split(batch), constants)), ddp.mesh.devices.flat[0])
    replica = mapped_over(spec.axis)(replica)
    mapped = jax.jit(jax.vmap(replica, in_axes=(axes, Inputs(0, None)), axis_name=spec.axis))
    grads, new, metrics = mapped(*given)

    def joined(x: jax.Array, layout: Layout) -> jax.Array:
        if isinstance(layout, Divided):
            return jnp.concatenate([*x], axis=layout.dim)
        return x[0] if layout == Replicated() else x

    new = jax.tree.map(joined, new, layouts)
    return jax.tree.map(lambda x: x[0], grads), new, jax.tree.map(lambda x: x[0], metrics)


_ROUNDINGS = {np.dtype(jax.numpy.bfloat16): 2**-8, np.dtype(np.float16): 2**-11}
_TF32_ROUNDING = 2**-11
_is_same = functools.partial(np.array_equal, equal_nan=True)


class _Taken(NamedTuple):
    """Results of a step, on the host."""

    gradients: Grads
    state: TrainState
    metrics: Metrics


def verify(
    model: Any,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: Batch,
    *,
    seed: int = 0,
    constants: PyTree = None,
    **options: Any,
) -> Verification:
    """Compares a step on N devices with a step on one device over the whole batch.

    Loss, metrics, gradients and other state must agree to 1e-4 of the largest entry of an array, or
    eight roundings of the coarsest floating dtype in the step. An update must agree to 5 % of its
    norm in each leaf, except where a gradient may be the rounding of zero, which Adam scales up to
    a whole step. On GPUs float32 products and convolutions are compared at `highest` precision,
    unless the program names another for them; the findings say which precision training will use.

    Args:
      model: The model, as for `jddp.DataParallel`.
      optimizer: The optimizer.
      loss_fn: The loss function.
      batch: Rows that divide over the devices.
      seed: Seed of the first state's PRNG key.
      constants: Constants, as for `jddp.DataParallel.with_constants`.
      **options: Options of `jddp.DataParallel`.

    Returns:
      The comparisons, each with its worst leaf, and likely causes of differences.

    Raises:
      UsageError: If there is one device only, or several processes, or an option by which replicas
        differ from one device by design: groups of batch norm, or local steps.
    """
    if jax.process_count() > 1:
        raise UsageError("verify needs the whole batch on one device: run it in one process.")

    def wrapped(**options: Any) -> DataParallel:
        ddp = DataParallel(model, optimizer, loss_fn, **options | {"donate": False})
        return ddp if constants is None else ddp.with_constants(constants)

    many = wrapped(**options)
    rows = as_arrays(batch)
    if many.steps.spec.model.sync.group_size is not None:
        raise UsageError(
            "With batch_norm.group_size each group of replicas has its own statistics, which one "
            "device cannot have: verify without it."
        )
    if alone := many.steps.spec.sync.alone:
        raise UsageError(f"{alone}: verify without it.")
    compared = functools.partial(_compared, wrapped, options, rows, seed, constants)
    if not _is_coarse(many, rows):
        return compared()
    with jax.default_matmul_precision("highest"):
        report = compared()
    precision = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  # unknown to mypy
    return dataclasses.replace(report, findings=(*report.findings, findings.coarse(precision)))


def _compared(
    wrapped: Callable[..., DataParallel],
    options: Mapping[str, Any],
    batch: Batch,
    seed: int,
    constants: PyTree,
) -> Verification:
    many = wrapped(**options)
    if many.mesh.size < 2:
        raise UsageError(
            "verify compares several devices with one, and there is only one. For virtual devices, "
            "call jax.config.update('jax_num_cpu_devices', 8) before anything else of JAX."
        )
    state = _first_state(many, seed, batch)
    got = _step(many, state, batch)
    # With logical replicas one device has all of them too, and uses the same random numbers.
    spec, planned = many.steps.spec, many.steps.planned(batch)
    has_all = spec.replicas.total(1) == spec.replicas.total(many.mesh.size)
    draws = planned.uses_rng and not has_all
    traces = {ddp.steps.lower(batch).as_text() for ddp in (many, wrapped(**options))}
    is_repeatable = len(traces) == 1
    found = [] if is_repeatable else [findings.NOT_REPEATABLE]
    if planned.traced is not None and planned.traced.has_batch_statistics:
        found.append(findings.MICRO_BATCHES)
    if draws:
        together, strategy = many, options.get("strategy")
        if isinstance(strategy, FSDP) and strategy.group_size is not None:
            # Divides over all replicas, since `vmap` has no collectives of groups.
            strategy = dataclasses.replace(strategy, group_size=None)
            together = wrapped(**{**options, "strategy": strategy})
        want = _Taken(*jax.device_get(side_by_side(together, state, batch, constants)))
        again = _step(many, state.replace(key=jax.random.fold_in(state.key, 1)), batch)
        same = jax.tree.map(_is_same, got.gradients, again.gradients)
        found.append(findings.SAME_NUMBERS if jax.tree.all(same) else findings.OWN_NUMBERS)
    else:
        # Reduction and strategy change only roundings, but for logical replicas.
        without = {"reduction"} if has_all else {"reduction", "strategy"}
        here: dict[str, Any] = {name: x for name, x in options.items() if name not in without}
        # Keeps the axis name of a given mesh; batch norm sees the same micro-batches.
        here["mesh"] = jax.sharding.Mesh(many.mesh.devices.flat[:1], many.mesh.axis_names)
        here["accumulate_steps"] = spec.backward.num
        one = wrapped(**here)
        values = many.model(state)
        alone = _first_state(one, seed, batch, values if isinstance(values, Mapping) else None)
        want = _step(one, alone, batch if has_all else _in_order(batch, many))
    comparisons = _compare(got, want, many, state, batch)
    if names := _not_finite(got, want):
        found.append(findings.not_finite(names))
    elif not all(comparison.passed for comparison in comparisons):
        combined = None
        if not (draws or has_all or jax.tree.leaves(alone.model_state)):
            plain = wrapped(**here | {"accumulate_steps": 1})
            combined = _combined(plain, alone, batch, many.mesh.size, comparisons[1].allowed)
        causes = [
            *findings.causes(
                spec,
                num_devices=many.mesh.size,
                losses=(float(got.metrics["loss"]), float(want.metrics["loss"])),
                is_scalar="loss" in planned.scalars,
                is_weighted=bool(weights_in(batch)),
                combined=combined,
            )
        ]
        if is_repeatable and not causes:
            causes = [findings.UNKNOWN]
        found += causes
    return Verification(many.mesh.size, count_rows(batch), draws, comparisons, tuple(found))


def _is_coarse(ddp: DataParallel, batch: Batch) -> bool:
    """Whether the hardware rounds the factors of float32 products, as GPUs do with TF32."""
    return platform(ddp.mesh) != "cpu" and coarse_products(ddp.steps.trace(batch).jaxpr.jaxpr)


def _not_finite(got: _Taken, want: _Taken) -> list[str]:
    """Names of metrics, and of the first gradient, that are not finite on both."""
    grads = findings.not_finite_in_both(got.gradients, want.gradients)
    return [
        *findings.not_finite_in_both(got.metrics, want.metrics),
        *(f"the gradient of {path}" for path in grads[:1]),
    ]


def _step(ddp: DataParallel, state: TrainState, batch: Batch) -> _Taken:
    return _Taken(*jax.device_get((ddp.gradients(state, batch)[0], *ddp.step(state, batch))))


def _first_state(ddp: DataParallel, seed: int, batch: Batch, params: Params = None) -> TrainState:
    """A first state; its loss scale, if it has one, is reduced until a step is not skipped."""
    state = ddp.init(seed, batch, params)
    while ddp.steps.spec.guard.follows_overflows:
        after, scale = ddp.step(state, batch)[0], ddp.steps.spec.guard.scale
        if not scale(after) < scale(state):
            break
        state = state.replace(comm_state=after.comm_state)
    return state


def _in_order(batch: Batch, ddp: DataParallel) -> Batch:
    """The rows in the order in which the devices compute them, by micro-batches."""
    num_shares = ddp.mesh.size
    num_micro_batches = ddp.steps.spec.backward.num

    def reorder(x: np.ndarray) -> np.ndarray:
        split = x.reshape(num_shares, num_micro_batches, -1, *x.shape[1:])
        return split.swapaxes(0, 1).reshape(x.shape)

    return jax.tree.map(reorder, batch)


def _combined(
    one: DataParallel, state: TrainState, batch: Batch, num_shares: int, allowed: float
) -> str:
    """How the gradient of all rows follows from the gradients of a replica batch and of the rest.

    The gradient of sum(l * w) / sum(w) is a mean of the two, with weights that need not be
    proportional to their counts; if the loss couples examples, it is no mean of them.
    """
    share = np.arange(count_rows(batch)) * num_shares // count_rows(batch)
    is_scalar = "loss" in one.steps.planned(batch).scalars

    def gradient(is_taken: np.ndarray) -> tuple[list[np.ndarray], float]:
        grads, metrics = one.gradients(state, jax.tree.map(lambda x: x[is_taken], batch))
        count = float(is_taken.sum() if is_scalar else metrics["count"])
        return [findings.exact(x) for x in jax.tree.leaves(jax.device_get(grads))], count

    whole, _ = gradient(share >= 0)
    for i in range(num_shares):
        (own, count), (rest, other) = gradient(share == i), gradient(share != i)
        apart, away = (jax.tree.map(np.subtract, x, rest) for x in (own, whole))
        nearest = _dot(apart, away) / (_dot(apart, apart) or 1.0)
        weights = count / (count + other), nearest
        means = [jax.tree.map(lambda y, d, w=w: y + w * d, rest, apart) for w in weights]
        fits = [findings.compare("", mean, whole, allowed=allowed).passed for mean in means]
        if not fits[0]:
            is_empty = np.isnan(nearest) and np.isfinite(_dot(whole, whole))  # 0 / 0 in a share
            return "weights" if fits[1] or is_empty else "neither"
    return "mean"


def _dot(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return float(sum(np.vdot(x, y).real for x, y in zip(a, b, strict=True)))


def _compare(
    got: _Taken, want: _Taken, many: DataParallel, state: TrainState, batch: Batch
) -> tuple[Comparison, ...]:
    computed = dtypes(many.steps.trace(batch).jaxpr.jaxpr)
    roundings = [size for dtype, size in _ROUNDINGS.items() if dtype in computed]
    if _is_coarse(many, batch):  # The model may name a precision itself.
        roundings.append(_TF32_ROUNDING)
    allowed = max([1e-4, *(8 * size for size in roundings)])
    layouts = many.steps.layouts(state).model_state
    left_out = {"loss_scale"}  # The loss scale depends on the rows of a replica.
    if "loss" in many.steps.planned(batch).scalars:
        left_out.add("count")  # A scalar loss counts once a replica.

    def means(step: _Taken) -> Metrics:
        return {name: x for name, x in step.metrics.items() if name not in left_out}

    def shared(step: _Taken) -> ModelState:
        kept = step.state.model_state
        return jax.tree.map(lambda x, y: None if y.is_per_replica else x, kept, layouts)

    before = jax.device_get(state.params)
    moved = got.state.params, want.state.params
    return (
        findings.compare("loss and metrics", means(got), means(want), allowed=allowed, floor=1e-6),
        findings.compare("gradients", got.gradients, want.gradients, allowed=allowed),
        findings.compare("other state", shared(got), shared(want), allowed=allowed),
        findings.compare_moves("update", before, *moved, want.gradients, noise=allowed),
    )
