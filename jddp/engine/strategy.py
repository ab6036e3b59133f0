"""Strategies: how parameters and the optimizer's state are kept, and when replicas synchronize.

    "ddp"                equal on all replicas, which average gradients in each step
    "zero1"              the same, and each replica keeps a shard of the optimizer's state
    "fsdp"               each replica keeps a part of parameters, their average and that state
    LogicalReplicas(8)   the same, with sums in one order whatever the number of devices
    LocalSteps(16)       each replica's own, averaged every 16 steps

One is chosen, and decides on several parts of the step together.
"""

import dataclasses
from typing import NamedTuple

from jddp.engine.protocols import Synchronization
from jddp.engine.sync import EveryStep, LocalSteps
from jddp.errors import ConfigError
from jddp.reduce.shards import Groups


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
