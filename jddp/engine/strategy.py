"""Strategies: how parameters and the optimizer's state are kept, and when replicas synchronize.

    "ddp"                equal on all replicas, which average gradients in each step
    "zero1"              the same, and each replica keeps a shard of the optimizer's state
    "fsdp"               each replica keeps a part of parameters, their average and that state
    LogicalReplicas(8)   the same, with sums in one order whatever the number of devices
    LocalSteps(16)       each replica's own, averaged every 16 steps

One is chosen, and decides on several parts of the step together. The pairs of options that conflict
are refused here.
"""

import dataclasses
import logging
from typing import NamedTuple

from jax.sharding import Mesh

from jddp.config.options import Reduction
from jddp.engine.bitwise.logical_replicas import FixedReplicas
from jddp.engine.bitwise.rows_of_sums import pack_rows
from jddp.engine.guard import unscaled
from jddp.engine.mesh import axis_of, count_processes, platform
from jddp.engine.placement import FullySharded
from jddp.engine.spec import Devices, EveryStep, Placement, Replicas, Synchronization
from jddp.engine.sync import LocalSteps
from jddp.ground.errors import ConfigError
from jddp.modules.base import FlaxModel
from jddp.reduce.hooks import as_is
from jddp.reduce.lazy import Lazy
from jddp.reduce.packing import average_of_shards, choose_packing
from jddp.reduce.reducer import Reducer, bucket_sizes, choose_layout, make_reducer
from jddp.reduce.shards import Groups, divided_dim
from jddp.reduce.units import Gather

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


@dataclasses.dataclass(frozen=True)
class ZeRO1:
    """Each replica updates its shard of every parameter, and keeps the optimizer's state for it.

    An optimizer that does not update each element by itself, such as Muon, gets whole arrays for
    the update: its equations show which it is.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      2020, stage 1. https://arxiv.org/abs/1910.02054.
    """


@dataclasses.dataclass(frozen=True)
class FSDP:
    """Each replica keeps a part of each parameter, and gathers the rest where the model uses it.

    A parameter is divided along the largest of its dims that the number of replicas divides; one
    that has none stays whole. The optimizer's state is divided in the same way, and optimizers that
    need whole arrays get them, as with `ZeRO1`.

    Attributes:
      regather: Whether parameters are gathered again in the backward pass. If not, they are kept
        from the forward pass: that is faster, and takes the memory of all parameters.
      group_size: Number of neighbouring replicas that divide parameters among them: the GPUs of a
        host, whose links are fast. Each group has a whole copy, and groups average their gradients,
        each replica its part. None for one group, of all replicas.

    Raises:
      ConfigError: If the size is not a number of at least 2.

    References:
      Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
      https://arxiv.org/abs/2304.11277.
    """

    regather: bool = True
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Refuses a size that is no number, or of one replica."""
        size = self.group_size
        if size is not None and (type(size) is not int or size < 2):
            raise ConfigError(
                f"FSDP: group_size is a number of replicas, at least 2, or None for all; got "
                f"{size!r}. Parameters that are whole on each replica are strategy='ddp'."
            )

    def groups(self, num_replicas: int) -> Groups:
        """Returns the groups of so many replicas.

        Raises:
          ConfigError: If groups of this size are not all of them, with the sizes that would do.
        """
        size = self.group_size or num_replicas
        if num_replicas % size:
            sizes = [k for k in range(2, num_replicas + 1) if num_replicas % k == 0]
            raise ConfigError(
                f"strategy.group_size={size} does not divide {num_replicas} replicas. Choose "
                + (f"one of {sizes}." if sizes else "None.")
            )
        return Groups(size, num_replicas // size)


@dataclasses.dataclass(frozen=True)
class LogicalReplicas:
    """A step that is defined on a fixed number of replicas, whatever the number of devices.

    Results are bitwise identical on any number of CPU devices that divides the number of replicas;
    on GPUs see docs/bitwise.md.

    Attributes:
      number: Number of replicas.

    Raises:
      ConfigError: If there is less than one.
    """

    number: int

    def __post_init__(self) -> None:
        """Refuses a number out of range."""
        if self.number < 1:
            raise ConfigError(f"LogicalReplicas: number is at least 1; got {self.number}.")


Strategy = str | ZeRO1 | FSDP | LogicalReplicas | LocalSteps


class StrategyParts(NamedTuple):
    """The parts of a step that follow from a strategy.

    Attributes:
      sync: Synchronization of the replicas.
      shards_optimizer: Whether each replica updates its shard of the parameters.
      num_logical: Number of logical replicas; None for one replica a device.
      fsdp: The division of the parameters; None where they are whole on each replica.
    """

    sync: Synchronization = EveryStep()
    shards_optimizer: bool = False
    num_logical: int | None = None
    fsdp: FSDP | None = None


def choose_strategy(strategy: Strategy) -> StrategyParts:
    """Returns the parts of a strategy.

    Raises:
      ConfigError: If it is none.
    """
    match strategy:
        case "ddp":
            return StrategyParts()
        case "zero1" | ZeRO1():
            return StrategyParts(shards_optimizer=True)
        case "fsdp":
            return StrategyParts(fsdp=FSDP())
        case FSDP():
            return StrategyParts(fsdp=strategy)
        case LogicalReplicas():
            return StrategyParts(num_logical=strategy.number)
        case LocalSteps():
            return StrategyParts(sync=strategy)
    raise ConfigError(
        f"strategy={strategy!r} is none. Choose 'ddp', 'zero1', 'fsdp', "
        "jddp.LogicalReplicas(number) or jddp.LocalSteps(every)."
    )


def choose_reducer(
    reduction: Reduction, strategy: StrategyParts, batch_norm: str, mesh: Mesh, *, is_scaled: bool
) -> tuple[Reducer, bool]:
    """Returns the reducer of the gradients, and whether it works inside the backward pass.

    Args:
      reduction: Form in which gradients are averaged.
      strategy: Parts of the step that the strategy decides.
      batch_norm: "sync", "broadcast" or "local".
      mesh: The devices.
      is_scaled: Whether the loss is scaled; a custom hook gets gradients without that scale.

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


def choose_replicas(axis: str, model: FlaxModel, num: int | None, num_devices: int) -> Replicas:
    """Returns logical replicas of this number, or the devices.

    Raises:
      ConfigError: If they do not divide over the devices.
    """
    replicas = Devices(axis, model) if num is None else FixedReplicas(axis, model, num)
    replicas.total(num_devices)
    return replicas


def choose_placement(reducer: Reducer, mesh: Mesh, fsdp: FSDP | None) -> Placement:
    """Returns the placement of parameters.

    Args:
      reducer: Reducer of the gradients of whole parameters.
      mesh: The devices.
      fsdp: The division of the parameters; None where they are whole on each replica.
    """
    if fsdp is None:
        return Placement()
    groups = fsdp.groups(mesh.size)
    if groups.size == 1:
        logging.getLogger("jddp").warning("strategy='fsdp' on one device is 'ddp'.")
        return Placement()
    average = average_of_shards(platform(mesh), groups)
    gather = Gather(reducer.axis, average, groups, reducer.wire_dtype)
    return FullySharded(Lazy(gather, reducer.bucket_bytes, keeps=not fsdp.regather))
