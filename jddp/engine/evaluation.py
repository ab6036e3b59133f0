"""Means over every example exactly once, or outputs of a model, for any number of examples.

    metrics = evaluate_exactly(run, batches, mesh, num_shares)
    outputs = predict_rows(run, batches, mesh)

Rows that do not fill the devices are padded, and padding is masked. Sums and counts leave
the devices; they are added up on the host in float64, so that counts stay whole numbers.

A state is evaluated with its own parameters, the optimizer's, or a moving average. Optimizers that
evaluate other parameters than they step are known by the names in their state, so that a checkpoint
shows them too:

    optax.contrib.schedule_free    x, from the iterates y and z
    optax.contrib.sam              the parameters before an adversarial step
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jddp.engine.calls import from_all_processes
from jddp.engine.mesh import HostOrDevice, RowSplit, input_specs, over_replicas, put_rows, shardings
from jddp.engine.state import Inputs, TrainState, Values, by_path, name_of, widened
from jddp.engine.step import Step
from jddp.ground.errors import ConfigError, UsageError, check_choice
from jddp.ground.typing import Batch, Batches, LossFn, Metrics, ModelState, Params, PyTree, Tree
from jddp.modules.base import name_arguments
from jddp.modules.forward import mask_of, run_forward
from jddp.modules.metrics import Sum, Sums, Totals, count_valid_rows
from jddp.modules.rows import as_arrays, check_rows, count_rows


def pad_rows(batch: Tree, room: int) -> tuple[Tree, np.ndarray]:
    """Pads a batch to `room` rows with copies of its last; also returns which rows count."""
    rows = count_rows(batch)
    valid = (np.arange(room) < rows).astype(np.float32)
    if rows == room:
        return batch, valid

    def pad(x: Array | np.ndarray) -> Array | np.ndarray:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x[np.minimum(np.arange(room), rows - 1)]
        widths = [(0, room - rows)] + [(0, 0)] * (x.ndim - 1)
        # Pads with a real row: rows of zeros can make NaN in a model, such as log 0 or 0 / 0.
        return np.pad(x, widths, mode="edge" if rows else "constant")

    return jax.tree.map(pad, batch), valid


def refuse_padding(sums: Sums, instead: str) -> None:
    """Refuses rows of padding if a loss or metric cannot leave them out.

    Args:
      sums: Sums of the loss and metrics.
      instead: Other way out, for the message.

    Raises:
      UsageError: If there is a scalar, or a `Mean` of scalars.
    """
    for name, x in sums.items():
        if not x.is_maskable:
            raise UsageError(
                f"{name!r} is a scalar, so rows of padding cannot be kept out of it. Return one "
                f"value per row, or a jddp.Mean of totals and counts per row; or {instead}."
            )


def pad_for_step(batch: Batch, split: RowSplit, sums: Sums, num_rows: int | None = None) -> Batch:
    """Pads this process's rows until they divide, as `jddp.DataParallel.pad` does.

    Args:
      batch: A dict of arrays, as `as_arrays` makes them.
      split: Division of the rows of a step.
      sums: Sums of the loss and metrics, which padding must leave alone.
      num_rows: Number of rows to pad to; by default the next that divides.
    """
    if not isinstance(batch, dict):
        raise ConfigError(f"pad adds 'mask' to a dict of arrays; got {type(batch).__name__}.")
    rows, num_parts = count_rows(batch), split.num_local_micro_batches
    if num_rows is None:
        most = max(1, int(from_all_processes(rows, "pad").max()))
        num_rows = -(-most // num_parts) * num_parts
    check_rows(num_rows, num_parts, f"{num_parts} micro-batches of this process")
    if rows > num_rows:
        raise ConfigError(f"pad: the batch has {rows} rows, more than num_rows={num_rows}.")
    if rows < num_rows:
        refuse_padding(sums, f"give batches of {num_rows} rows")
    padded, valid = pad_rows(batch, num_rows)
    mask = np.asarray(padded.get("mask", valid), np.float32)
    return {**padded, "mask": mask * np.expand_dims(valid, tuple(range(1, mask.ndim)))}


Read = Callable[[Callable[[Values], PyTree]], Any]  # calls a function with values of a model


# Fields of optimizers that evaluate other parameters: a field that shows such an optimizer, and its
# field with the other parameters.
OTHERS = {"weight_sum": "z", "steps_since_sync": "cache"}
FIELDS = {*OTHERS, *OTHERS.values(), "b1"}


def with_average(model_state: ModelState, ema_state: ModelState | None) -> ModelState:
    """The other state with the averages that there are, in its own dtypes."""
    found = by_path(ema_state)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: found[name].astype(x.dtype) if (name := name_of(path)) in found else x,
        model_state,
    )


def evaluated_values(state: TrainState, name: str, merge: Callable[[Values], Values]) -> Values:
    """Returns the parameters and the other state with which a state is evaluated.

    Args:
      state: The state.
      name: "params", or "ema" for the moving average, in the same dtypes.
      merge: Function that averages the per-replica leaves.

    Raises:
      ConfigError: If there is no such name, or no average.
    """
    check_choice("params", name, ("params", "ema"))
    if name == "params":
        own = by_path(state.opt_state)
        kept = {name: own[name] for name in read_in_evaluation(own)}
        both: Any = state.params, kept
        both, model_state = merge((both, state.model_state))
        return optimizer_params(*both), model_state
    if state.ema_params is None:
        raise ConfigError("params='ema' needs DataParallel(..., ema_decay=...).")
    params = optax.tree.cast_like(state.ema_params, state.params)
    return merge((params, with_average(state.model_state, state.ema_state)))


def read_in_evaluation(names: Iterable[str]) -> set[str]:
    """The arrays of an optimizer's state, by path, that `optimizer_params` may need."""
    return {name for name in names if not FIELDS.isdisjoint(name.split("/"))}


def optimizer_params(params: Params, kept: Mapping[str, Any]) -> Params:
    """The parameters with which an optimizer is evaluated; most optimizers evaluate their own.

    Args:
      params: The parameters that the optimizer steps.
      kept: Arrays of its state by path, without rows for each replica; shards are flat.
    """
    values = by_path(params)
    for name, number in kept.items():
        above, field = name[: name.rfind("/") + 1], name[name.rfind("/") + 1 :]
        for path, x in values.items() if field in OTHERS else ():
            if (y := kept.get(f"{above}{OTHERS[field]}/{path}")) is None:
                continue  # The optimizer masks this parameter.
            y = widened(y if y.shape == x.shape else y.ravel()[: x.size].reshape(x.shape))
            if field == "weight_sum":  # Follows optax.contrib.schedule_free_eval_params.
                b1 = widened(kept[f"{above}b1"])
                y = (widened(x) - (1 - b1) * y) / b1
            elif int(number) == 0:
                y = x
            y = y.astype(x.dtype)
            values[path] = jax.device_put(y, x.sharding) if isinstance(x, jax.Array) else y
    return jax.tree.unflatten(jax.tree.structure(params), values.values())


def make_evaluate(step: Step, mesh: jax.sharding.Mesh) -> jax.stages.Wrapped:
    """Returns `evaluate(key, values, number, inputs, valid)` over the mesh.

    It takes the sums of evaluation batch `number` over all replicas; "examples" counts rows.
    """

    def replica(
        key: Array, read: Read, number: Array, inputs: Inputs, valid: Float[Array, "b"]
    ) -> Sums:
        def one(rows: Batch, valid: Array, key: Array) -> Sums:
            def run(values: Values) -> Sums:
                given = (*values, rows, key, inputs.constants, valid)
                return run_forward(step.model, step.eval_fn, *given)[1][0]

            sums = read(run)
            examples = count_valid_rows(mask_of(rows, valid))
            return {**sums, "examples": Sum(examples, examples)}

        return step.replicas.evaluate(one, jax.random.fold_in(key, number), inputs.rows, valid)

    return step.replicas.jit(_mapped(step, replica, mesh, jax.P()))


def make_predict(step: Step, mesh: jax.sharding.Mesh, function: LossFn) -> jax.stages.Wrapped:
    """Returns `predict`, called as `evaluate` is: the results of `function` for each row."""

    def replica(
        key: Array, read: Read, number: Array, inputs: Inputs, valid: Float[Array, "b"]
    ) -> PyTree:
        # Folded with batch and replica: with one key, a model that samples while it is evaluated
        # would use the same numbers for every batch.
        key = jax.random.fold_in(jax.random.fold_in(key, number), jax.lax.axis_index(step.axis))
        named = name_arguments(function, inputs.constants, key)
        model = step.model
        outputs = read(lambda x: model.evaluate(named, *model.whole(*x), inputs.rows, key))
        for x in jax.tree.leaves(outputs):
            if jnp.shape(x)[:1] != valid.shape:
                raise ConfigError(
                    f"predict: the function returned shape {jnp.shape(x)} for {len(valid)} rows. "
                    "Return arrays whose first dim is the rows."
                )
        return outputs

    return jax.jit(_mapped(step, replica, mesh, jax.P(step.axis)))


def _mapped(
    step: Step, replica: Callable[..., PyTree], mesh: jax.sharding.Mesh, out_specs: jax.P
) -> Callable[..., PyTree]:
    """Maps a replica's function, which calls others with the values of the model."""
    inputs = input_specs(mesh)

    @functools.wraps(replica)
    def call(key: Array, values: Values, *others: PyTree) -> PyTree:
        layouts = jax.tree.map(lambda x: step.placement.layout(x.shape), values[0])
        source = step.placement.source(layouts)

        @functools.wraps(replica)
        def one(key: Array, values: Values, *others: PyTree) -> PyTree:
            params, model_state = values
            return replica(
                key, lambda f: source.run(lambda x: f((x, model_state)), params), *others
            )

        given = (jax.P(), (shardings(layouts, mesh), jax.P()), jax.P(), inputs, inputs.rows)
        return over_replicas(one, mesh, given, out_specs)(key, values, *others)

    return call


def evaluate_exactly(
    run: Callable[[Batch, HostOrDevice], Sums],
    batches: Batches,
    mesh: jax.sharding.Mesh,
    num_shares: int,
) -> Metrics:
    """Returns the means of the sums of `run`, over all rows of `batches`.

    Args:
      run: Function `run(batch, valid)` over the mesh; `valid` is 1 for a row that counts.
      batches: Batches of this process, of any size, also empty; as many on every process.
      mesh: The mesh of devices.
      num_shares: Number of replicas of this process, over which its rows are split.

    Raises:
      UsageError: If rows of padding would count in a scalar, or there is no batch.
    """
    totals, waiting = Totals(), Sums()
    for sums in sums_of(run, batches, mesh, num_shares):
        totals.add(waiting)  # one batch late, so that the devices never wait
        waiting = sums
    totals.add(waiting)
    return totals.values()


def sums_of(
    run: Callable[[Batch, HostOrDevice], Sums],
    batches: Batches,
    mesh: jax.sharding.Mesh,
    num_shares: int,
) -> Iterator[Sums]:
    """Sums of `run` for each batch, or their shapes; refuses padding as `evaluate_exactly`."""
    for placed in _place(batches, mesh, num_shares):
        sums = run(placed.rows, placed.valid)
        if placed.fewest < placed.room:
            instead = f"give batches that divide: {placed.fewest} rows do not fill {placed.room}"
            refuse_padding(sums, instead)
        yield sums


def predict_rows(
    run: Callable[[Batch, HostOrDevice], PyTree], batches: Batches, mesh: jax.sharding.Mesh
) -> PyTree:
    """Returns the results of `run` for all rows of `batches` of this process, in their order.

    Args:
      run: Function `run(batch, valid)` over the mesh that returns a tree of arrays, a row for each
        of the batch.
      batches: Batches of this process, of any size; as many on every process.
      mesh: The mesh of devices.

    Returns:
      The tree, of numpy arrays.

    Raises:
      UsageError: If there is no batch.
    """
    found = [
        jax.tree.map(lambda x, n=placed.num_rows: own_rows(x)[:n], run(placed.rows, placed.valid))
        for placed in _place(batches, mesh, len(mesh.local_devices))
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def own_rows(x: jax.Array) -> np.ndarray:
    """The rows of an array that lie on this process's devices."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def check_batches(batches: object, called: str) -> None:
    """Refuses an object that is no batches, such as a dict of arrays, over whose keys one iterates.

    Raises:
      ConfigError: If it is one.
    """
    is_rows = isinstance(batches, Mapping) or hasattr(batches, "dtype")
    if is_rows or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        name = type(batches).__name__
        raise ConfigError(f"{called} batches, such as jddp.data.eval_batches(...), not {name}.")


class _Placed(NamedTuple):
    """A batch on the devices, padded.

    Attributes:
      rows: Rows of all processes.
      valid: Array with 1 for a row that counts, and 0 for padding.
      num_rows: Number of rows of this process that count.
      fewest: The smallest such number of any process.
      room: Number of rows of each process, padding included.
    """

    rows: Batch
    valid: HostOrDevice
    num_rows: int
    fewest: int
    room: int


def _place(batches: Batches, mesh: jax.sharding.Mesh, num_shares: int) -> Iterator[_Placed]:
    check_batches(batches, "evaluate and predict take")
    room = 0
    for batch in map(as_arrays, batches):
        num_rows = count_rows(batch)
        # All processes must run the same program, so they agree on the size of each batch first,
        # by way of their hosts: devices still compute the batch before. A process whose batch is
        # empty takes part with padding alone.
        rows = from_all_processes(num_rows, "evaluate")
        fitting = max(1, math.ceil(rows.max() / num_shares)) * num_shares
        # A partial batch is padded to the size of a full one, for which the program is compiled.
        room = fitting if (rows == fitting).all() else max(room, fitting)
        placed, valid = put_rows(pad_rows(batch, room), mesh)
        yield _Placed(placed, valid, num_rows, int(rows.min()), room)
    if room == 0:
        raise UsageError("evaluate or predict got no batches. Was the iterator used up before?")
