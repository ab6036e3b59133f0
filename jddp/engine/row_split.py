"""The division of a step's rows: over processes, replicas and micro-batches.

rows = RowSplit.of(spec, mesh)
rows.check(batch)                # this process's rows, or those of all
rows.of_micro_batch(batch)       # number of rows of one micro-batch
"""

import dataclasses

import jax
from jax.sharding import Mesh

from jddp.engine.spec import Step
from jddp.modules.rows import check_rows, count_rows
from jddp.typing import Batch, Settings


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """The numbers by which rows are divided.

    Attributes:
      num_replicas: Replicas of all processes together: one a device, or logical ones.
      num_local_replicas: Replicas of this process.
      accumulate_steps: Micro-batches of a replica.
      noun: Word for the replicas, for messages.
    """

    num_replicas: int
    num_local_replicas: int
    accumulate_steps: int
    noun: str

    @classmethod
    def of(cls, spec: Step, mesh: Mesh) -> "RowSplit":
        """The division of rows by a step on a mesh."""
        num_replicas = spec.replicas.total(mesh.size)
        return cls(
            num_replicas=num_replicas,
            num_local_replicas=num_replicas // mesh.size * len(mesh.local_devices),
            accumulate_steps=spec.backward.num,
            noun=spec.replicas.noun,
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, of all replicas: a divisor of the global batch size."""
        return self.num_replicas * self.accumulate_steps

    @property
    def num_local_micro_batches(self) -> int:
        """Micro-batches of a step, of the replicas of this process."""
        return self.num_local_replicas * self.accumulate_steps

    def count_micro_batches(self, batch: Batch) -> int:
        """Micro-batches of all replicas that have rows of this batch."""
        leaves = jax.tree.leaves(batch)
        # An array with rows on other processes is the global batch; any other holds this process's
        # rows.
        on_all = all(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
        return self.num_micro_batches if on_all else self.num_local_micro_batches

    def check(self, batch: Batch) -> None:
        """Refuses rows that are not a multiple of the micro-batches.

        Raises:
          ConfigError: If they are not, with the sizes that would be.
        """
        num_parts = self.count_micro_batches(batch)
        what = f"{num_parts // self.accumulate_steps} {self.noun}"
        if self.accumulate_steps > 1:
            what += f" times accumulate_steps={self.accumulate_steps}"
        check_rows(count_rows(batch), num_parts, what)

    def of_micro_batch(self, batch: Batch) -> int:
        """Rows of a micro-batch; at least one."""
        # A batch that is empty, or has fewer rows than micro-batches, is planned for as one row.
        return max(1, count_rows(batch) // self.count_micro_batches(batch))


def topology_of(spec: Step, mesh: Mesh) -> Settings:
    """Processes, devices and options by which a step divides its rows and statistics.

    A checkpoint keeps them, and a run that resumes reports where they differ.
    """
    model = spec.model
    sync = model.sync
    state = {**dict.fromkeys(model.per_replica, "per_replica"), **dict(sync.rules)}
    return {
        **({"state": state} if state else {}),
        "num_processes": jax.process_count(),
        "num_devices": mesh.size,
        "accumulate_steps": spec.backward.num,
        "batch_norm": model.batch_norm,
        "batch_norm_group_size": sync.group_size,
        "logical_replicas": spec.replicas.num,
        "local_steps": spec.sync.every,
    }
