"""Chooses the reducer of a step from a strategy and a reduction; refuses pairs that conflict."""

import dataclasses

from jax.sharding import Mesh

from jddp.config.options import Reduction
from jddp.engine.bitwise.rows_of_sums import pack_rows
from jddp.engine.guard import unscaled
from jddp.engine.mesh import axis_of, count_processes, platform
from jddp.engine.strategy import StrategyParts
from jddp.errors import ConfigError
from jddp.reduce.average import bucket_sizes, choose_layout, make_reducer
from jddp.reduce.hooks import as_is
from jddp.reduce.packing import choose_packing
from jddp.reduce.reducer import Reducer
from jddp.reduce.shards import divided_dim

# Pairs of options that cannot be combined, and why. They are refused by their names: the parts
# themselves know nothing of each other.
REFUSED = {
    ("fsdp", "reduction.hook"): (
        "gradients are averaged by the transpose of the gathers, in the backward pass"
    ),
    ("fsdp", "reduction.overlap=True"): (
        "gradients leave inside the backward pass anyway, and overlap as the compiler has it"
    ),
    ("fsdp", "reduction.layout='leaf'"): "parameters of a unit are gathered as one vector",
    ("fsdp", "reduction.wire_dtype='float16'"): (
        "in the backward pass it is not known by what sums would have to be scaled; see bfloat16"
    ),
    ("fsdp", "batch_norm='local' or 'broadcast'"): (
        "NaN of a replica without a valid row would reach the gradients of all others"
    ),
    ("logical replicas", "reduction.hook"): "gradients are added in one order, which no hook keeps",
    ("logical replicas", "reduction.wire_dtype"): (
        "sums on the wire would round by the number of devices"
    ),
    ("logical replicas", "reduction.overlap=True"): (
        "gradients of several replicas are added before any is sent"
    ),
    ("local steps", "reduction.hook"): (
        "a hook reduces gradients in each step; see reduction.wire_dtype"
    ),
    ("local steps from the first", "reduction.overlap=True"): (
        "between outer steps no gradient is sent, beside which a backward pass could run"
    ),
    ("reduction.layout='leaf'", "reduction.overlap=True"): (
        "a bucket is waited for as a whole, and its leaves are reduced one by one"
    ),
}


def choose_reducer(
    reduction: Reduction, strategy: StrategyParts, batch_norm: str, mesh: Mesh, *, is_scaled: bool
) -> tuple[Reducer, bool]:
    """Returns the reducer of the gradients, and whether it works inside the backward pass.

    Args:
      reduction: Form in which gradients are averaged.
      strategy: What follows from the strategy.
      batch_norm: "sync", "broadcast" or "local".
      mesh: The devices.
      is_scaled: Whether the loss is scaled, of which a custom hook is to see nothing.

    Raises:
      ConfigError: If the two cannot be combined, with the reason, or the hook is none.
    """
    _refuse_pairs(strategy, reduction, batch_norm)
    # There is nothing to overlap where a step sends no gradients; and where some steps do, the
    # program, which holds steps with and without a mean, would hold the backward pass twice.
    sends = mesh.size > 1 and strategy.sync.every is None and strategy.num_logical is None
    sends = sends and strategy.fsdp is None
    overlap = reduction.overlap if sends or reduction.overlap is True else False
    hardware = platform(mesh)
    layout, overlaps = choose_layout(reduction.layout, overlap, lambda: hardware)
    if strategy.num_logical is None:
        packed = choose_packing(
            layout,
            reduction.hook,
            hardware,
            on_network=count_processes(mesh) > 1,
            is_sharded=strategy.shards_optimizer,
        )
    else:
        packed = pack_rows(layout, strategy.num_logical)
    seen = unscaled if is_scaled else as_is
    sizes = bucket_sizes(reduction.bucket_mb)
    reducer = make_reducer(axis_of(mesh), packed, sizes, reduction.wire_dtype, seen)
    if strategy.fsdp is not None and (size := strategy.fsdp.groups(mesh.size).size) > 1:
        reducer = dataclasses.replace(
            reducer, is_divided=lambda shape: divided_dim(shape, size) is not None
        )
    return reducer, overlaps


def _refuse_pairs(strategy: StrategyParts, reduction: Reduction, batch_norm: str) -> None:
    given = {
        "logical replicas": strategy.num_logical is not None,
        "fsdp": strategy.fsdp is not None,
        "local steps": strategy.sync.every is not None,
        "local steps from the first": strategy.sync.every is not None and not strategy.sync.start,
        "reduction.hook": reduction.hook is not None,
        "reduction.wire_dtype": reduction.wire_dtype is not None,
        "reduction.wire_dtype='float16'": reduction.wire_dtype == "float16",
        "batch_norm='local' or 'broadcast'": batch_norm != "sync",
        "reduction.overlap=True": reduction.overlap is True,
        "reduction.layout='leaf'": reduction.layout == "leaf",
    }
    for pair, why in REFUSED.items():
        if all(given[name] for name in pair):
            raise ConfigError(f"{' and '.join(pair)} cannot be combined: {why}. Leave one out.")
