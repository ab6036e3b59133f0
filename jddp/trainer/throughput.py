"""Throughput of a run: examples, tokens and model FLOPs per second, MFU, and peak memory.

    work = measure(ddp, batch)       # once, after the first step: traces and compiles nothing again
    work.rates(record, num_rows)     # fields of a record, from the time and the rows of a step

The work of a step is in proportion to its rows, so a record costs divisions alone. Tokens are those
that are predicted and count: the valid entries of the loss.
"""

import dataclasses
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jddp.engine.state import name_of
from jddp.engine.trainable import Trainable
from jddp.inspection.flops import count_flops, seconds_at_peak, uncounted
from jddp.inspection.memory import compiled_bytes, limit_bytes, peak_bytes
from jddp.modules.rows import count_rows
from jddp.typing import Batch, JsonObject, Record

# Names of arrays in a batch by which its examples are images, or sequences of tokens.
_IMAGES = {"image", "images", "pixel_values"}
_TOKENS = {"tokens", "input_ids", "inputs"}

log = logging.getLogger("jddp")


@dataclasses.dataclass
class Work:
    """The work of a step, on all devices together.

    Attributes:
      devices: Devices of this process, of which peak memory is read.
      num_rows: Number of rows of the step that was measured.
      per_step: The amount behind each rate in that step, by name of its field in records.
      has_token_losses: Whether its loss has an entry for each token of its sequences.
      unit: Unit of its examples, for people.
      predicted_bytes: Memory that the compiler has assigned to it on a device; None if not asked.
      limit_bytes: Memory that a device can give out; None if it has no statistics.
      buckets: What it sends: the bytes, the dtype, and the first and last path of each bucket.
    """

    devices: Sequence[jax.Device]
    num_rows: int
    per_step: dict[str, float]
    has_token_losses: bool = False
    unit: str = "ex"
    predicted_bytes: int | None = None
    limit_bytes: int | None = None
    buckets: list[JsonObject] = dataclasses.field(default_factory=list)

    def rates(self, record: Record, num_rows: int) -> dict[str, float | None]:
        """Further fields of a record, of those that are known, for steps of so many rows.

        Args:
          record: Record with "step_seconds", and with "count", which may be that of the tokens.
          num_rows: Number of rows of a step.
        """
        seconds = record["step_seconds"]
        share = num_rows / max(self.num_rows, 1) / seconds
        fields: dict[str, float | None] = {n: x * share for n, x in self.per_step.items()}
        if self.has_token_losses:
            fields["tokens_per_second"] = record["count"] / seconds
        if (peak := peak_bytes(self.devices)) is None:
            return fields
        fields |= {"peak_memory_bytes": peak, "predicted_memory_bytes": self.predicted_bytes}
        return fields | (
            {} if self.limit_bytes is None else {"memory_limit_bytes": self.limit_bytes}
        )


def measure(ddp: Trainable, batch: Batch) -> Work:
    """Counts the work of a step that has run; if that fails, the log has the reason.

    Args:
      ddp: The object that took the step.
      batch: Rows of the step, of all processes.
    """
    num_rows = count_rows(batch)
    work = Work(ddp.mesh.local_devices, num_rows, {"examples_per_second": num_rows})
    try:
        _count(work, ddp, batch)
    except Exception as error:  # A report is no reason to end a run.
        log.warning("The FLOPs of a step are not reported, since they cannot be counted: %r", error)
    return work


def _count(work: Work, ddp: Trainable, batch: Batch) -> None:
    """Adds facts from the traced passes and the compiled step."""
    mesh, steps = ddp.mesh, ddp.steps
    num_processes = mesh.size // len(mesh.local_devices)
    # Rows of other processes cannot be read, and shapes are all that is needed.
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(x) // num_processes, *x.shape[1:]), x.dtype), batch
    )
    traced, num_parts = steps.planned(rows).traced, steps.rows.num_micro_batches
    assert traced is not None  # There were rows.
    flops = {kind: x * num_parts for kind, x in count_flops(traced).items()}
    if names := uncounted(traced):
        log.warning("A step has more FLOPs than are reported, in %s.", ", ".join(sorted(names)))
    work.buckets = [
        {"bytes": x.bytes, "dtype": x.wire_dtype.name, "paths": [x.paths[0], x.paths[-1]]}
        for x in steps.sent(rows).buckets
    ]
    work.per_step["model_flops_per_second"] = sum(flops.values())
    seconds = seconds_at_peak(flops, mesh.devices.flat[0].device_kind)
    if seconds:
        work.per_step["mfu"] = seconds / mesh.size
    _name_examples(work, batch, traced.sums["loss"].num_entries * num_parts)
    if peak_bytes(work.devices) is not None:
        # JAX has kept the program of the step, and compiles nothing again.
        work.predicted_bytes = compiled_bytes(steps.lower(rows).compile())
        work.limit_bytes = limit_bytes(work.devices)


def _name_examples(work: Work, batch: Batch, num_entries: int) -> None:
    """Adds the unit of examples, and how tokens in sequences are counted.

    Tokens are the valid entries of the loss; if it has one for a row, those of the batch.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    named = {name_of(path).rpartition("/")[2]: x for path, x in leaves}
    if named.keys() & _IMAGES:
        work.unit = "images"
    for x in (named[name] for name in named.keys() & _TOKENS):
        if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer):
            work.has_token_losses = num_entries > len(x)
            if not work.has_token_losses:
                work.per_step["tokens_per_second"] = x.size
