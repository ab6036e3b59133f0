"""Holds a user's own model to the promise: N devices are one device with the whole batch.

    report = jddp.verify(model, optimizer, loss_fn, batch)
    print(report)
    assert report.passed

One step is taken twice from the same state: over the mesh, and on one of its devices. Random
numbers differ from replica to replica by design, so a model that draws some is judged beside one
device on which the N shares run side by side, with the N keys.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jddp.data_parallel import DataParallel
from jddp.errors import UsageError
from jddp.flaxmodel import LossFn
from jddp.loss_scale import DYNAMIC
from jddp.mesh import as_arrays, count_rows
from jddp.oracle.findings import CLOSE, Evidence, explain
from jddp.oracle.report import Comparison, Verification, compare, compare_moves
from jddp.oracle.side_by_side import side_by_side
from jddp.state import TrainState

__all__ = ["Verification", "verify"]

PyTree = Any
# What one device has no use for: how gradients travel.
_OF_THE_WAY = {"bucket_mb", "first_bucket_mb", "last_bucket_mb", "layout", "placement"}
_OF_THE_WAY |= {"wire_dtype", "comm_hook", "mesh", "shard_optimizer"}
_ROUNDINGS = {"bf16[": 2**-8, ":f16[": 2**-11}  # of dtypes, as a traced program names them


class _Step(NamedTuple):
    """What a step gives, on the host."""

    gradients: PyTree
    state: TrainState
    metrics: PyTree


def verify(
    model: Any,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    seed: int = 0,
    constants: PyTree = None,
    **options: Any,
) -> Verification:
    """Compares a step of N devices with that of one device on the whole batch.

    Loss, metrics, gradients and other state are judged tightly: to 1e-4 of the largest entry of an
    array, or eight roundings of the coarsest floating dtype in the step. An update is judged by how
    far a leaf moves, to 5 %, and not where a gradient may be the rounding of zero, of which Adam
    makes a whole step.

    Args:
      model: As for `jddp.DataParallel`.
      optimizer: The same.
      loss_fn: The same.
      batch: Rows that divide over the devices.
      seed: Of the first state.
      constants: As for `jddp.DataParallel.step`.
      **options: Those of `jddp.DataParallel`.

    Returns:
      What was compared, with the worst leaf, and in words what seems to be wrong.

    Raises:
      UsageError: If there is one device only, or several processes, or groups of batch norm, which
        by design are no single device.
    """
    _refuse(options)

    def wrapped(**options: Any) -> DataParallel:
        ddp = DataParallel(model, optimizer, loss_fn, **options, donate=False)
        return ddp if constants is None else ddp.given(constants)

    batch, many = as_arrays(batch), wrapped(**options)
    if many.mesh.size < 2:
        raise UsageError(
            "verify compares many devices with one, and there is one. For virtual ones call "
            "jax.config.update('jax_num_cpu_devices', 8) before anything else of JAX."
        )
    with _overheard() as warnings:
        state = _settled(many, many.init(seed, batch), batch)
        got = _step(many, state, batch)
    # Where shards are logical, one device carries them too, and draws the same.
    draws = many.draws(batch) and many.recipe.num_shards is None
    evidence = Evidence(
        num_devices=many.mesh.size,
        options=options,
        warnings=tuple(warnings),
        scalars=many.scalars,
        has_mask=isinstance(batch, Mapping) and "mask" in batch,
        is_repeatable=many.facts(batch) == wrapped(**options).facts(batch),
        draws=draws,
    )
    if draws:
        want = _Step(*jax.device_get(side_by_side(many, state, batch, constants)))
        other = state.replace(key=jax.random.fold_in(state.key, 1))
        evidence.key_matters = not _same(got, _step(many, other, batch))
    else:
        here = {name: value for name, value in options.items() if name not in _OF_THE_WAY}
        one = wrapped(mesh=many.mesh.devices.flat[:1].tolist(), **here)
        values = many.model(state)
        alone = one.init(seed, batch, params=values if isinstance(values, Mapping) else None)
        alone = _settled(one, alone, batch)
        has_shards = many.recipe.num_shards is not None
        want = _step(one, alone, batch if has_shards else _in_order(batch, many))
        evidence.rows_meet = _rows_meet(one, alone, batch, float(want.metrics["loss"]))
    evidence.losses = float(got.metrics["loss"]), float(want.metrics["loss"])
    comparisons = _compare(got, want, many, state, batch)
    passed = all(comparison.passed for comparison in comparisons)
    return Verification(
        num_devices=many.mesh.size,
        num_rows=count_rows(batch),
        is_side_by_side=draws,
        comparisons=comparisons,
        findings=tuple(explain(evidence, passed=passed)),
    )


def _refuse(options: Mapping[str, Any]) -> None:
    if jax.process_count() > 1:
        raise UsageError("verify holds the whole batch on one device: run it in one process.")
    if options.get("batch_norm_group_size") is not None:
        raise UsageError(
            "With batch_norm_group_size statistics are those of groups, and no single device has "
            "such: leave it out of verify."
        )
    if options.get("local_steps") is not None:
        raise UsageError(
            "With local_steps replicas differ between meetings by design, and no single device is "
            "all of them: leave it out of verify, which then judges the model and the loss."
        )


def _step(ddp: DataParallel, state: TrainState, batch: PyTree) -> _Step:
    return _Step(*jax.device_get((ddp.gradients(state, batch)[0], *ddp.step(state, batch))))


def _settled(ddp: DataParallel, state: TrainState, batch: PyTree) -> TrainState:
    """The state, with its loss scale, if it has one, brought down until a step is not skipped."""
    while ddp.recipe.loss_scale == DYNAMIC:
        after = ddp.step(state, batch)[0].comm_state
        if not after.loss_scale.scale < state.comm_state.loss_scale.scale:
            break
        state = state.replace(comm_state=after)
    return state


def _in_order(batch: PyTree, ddp: DataParallel) -> PyTree:
    """The rows in the order in which the devices take them, part by part."""
    shares, parts = ddp.mesh.size, ddp.world["accumulate_steps"]

    def reorder(x: Any) -> Any:
        x = np.asarray(x)
        split = x.reshape(shares, parts, -1, *x.shape[1:])
        return split.swapaxes(0, 1).reshape(x.shape)

    return jax.tree.map(reorder, batch)


def _rows_meet(one: DataParallel, state: TrainState, batch: PyTree, loss: float) -> bool:
    """Whether the loss of all rows is no mean of its halves', with no batch norm to say why."""
    if jax.tree.leaves(state.model_state):
        return False
    half = count_rows(batch) // 2
    halves = [
        jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(half), slice(half, 2 * half))
    ]
    metrics = [jax.device_get(one.gradients(state, rows)[1]) for rows in halves]
    losses, counts = zip(*((x["loss"], x["count"]) for x in metrics), strict=True)
    return not np.isclose(np.average(losses, weights=counts), loss, rtol=CLOSE)


def _same(a: _Step, b: _Step) -> bool:
    pairs = zip(jax.tree.leaves(a.gradients), jax.tree.leaves(b.gradients), strict=True)
    return all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def _compare(
    got: _Step, want: _Step, many: DataParallel, state: TrainState, batch: PyTree
) -> tuple[Comparison, ...]:
    program = str(many.trace(batch).jaxpr)
    allowed = max([1e-4, *(8 * size for name, size in _ROUNDINGS.items() if name in program)])
    kinds = many.kinds(state).model_state
    shared, wanted = (_shared(step.state.model_state, kinds) for step in (got, want))
    means, moved = _means(got, want, many.scalars), (got.state.params, want.state.params)
    before = jax.device_get(state.params)
    return (
        compare("loss and metrics", *means, allowed=allowed, floor=1e-6),
        compare("gradients", got.gradients, want.gradients, allowed=allowed),
        compare("other state", shared, wanted, allowed=allowed),
        compare_moves("update", before, *moved, want.gradients, noise=allowed),
    )


def _means(got: _Step, want: _Step, scalars: tuple[str, ...]) -> list[PyTree]:
    """The metrics; of scalar losses there is one a replica, so their count is no mean.

    A replica's loss scale depends on how many rows it has.
    """
    left_out = {"loss_scale", *(["count"] if "loss" in scalars else [])}
    return [
        {name: x for name, x in step.metrics.items() if name not in left_out}
        for step in (got, want)
    ]


def _shared(model_state: PyTree, kinds: PyTree) -> PyTree:
    """What replicas have alike of it: each keeps the rest as it likes."""
    return jax.tree.map(lambda x, kind: None if kind.is_per_replica else x, model_state, kinds)


@contextmanager
def _overheard() -> Iterator[list[str]]:
    """Collects what jddp warns of."""
    heard: list[str] = []
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("jddp")
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield heard
    finally:
        log.removeHandler(handler)
