"""Describes the communication of a step: the plan, and the collectives of its program.

    print(jddp.explain(ddp, batch))      # text in a terminal, HTML in a notebook
    jddp.explain(ddp, batch).as_json()   # the same as numbers and words
    jddp.explain(ddp, batch, target="h100", topology="8x8").prediction    # modelled, for 64 GPUs

This module reads plans and programs, and runs nothing.
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

import jax

from jddp.engine.compiled import CompiledSteps, Trainable
from jddp.engine.mesh import platform
from jddp.engine.step import Synchronization
from jddp.ground.names import tool
from jddp.ground.typing import Batch, JsonObject, Shown, in_mebibytes
from jddp.inspection import hlo
from jddp.inspection.memory import FIELDS, Memory, assigned_memory
from jddp.reduce.plan import Bucket, BucketPlan
from jddp.reduce.units import UNIT


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The communication of a compiled step; its `str` fits a terminal of 80 columns.

    Attributes:
      plan: The buckets.
      num_devices: Number of devices on which the step runs.
      platform: Their hardware.
      compiled: The collectives of the compiled program, in its order.
      sync: How often replicas synchronize.
      memory: Memory of the compiled step on each device.
      prediction: The step on described GPUs, `jddp.workbench.prediction.Prediction`; None for
        devices at hand.
    """

    plan: BucketPlan
    num_devices: int
    platform: str
    compiled: tuple[hlo.Collective, ...]
    sync: Synchronization
    memory: Memory
    prediction: Any = None

    @property
    def bytes_per_step(self) -> float:
        """Average number of bytes that a step sends; with `LocalSteps`, after its plain steps.

        Each array counts once, whatever algorithm the network uses.
        """
        return sum(x.bytes * self._runs(x) for x in self.compiled)

    @property
    def verdict(self) -> str:
        """The bytes that a step sends, and the share that is hidden, in one sentence."""
        if self.num_devices == 1:
            return "Nothing is sent: there is one device."
        hidden = sum(x.bytes * self._runs(x) for x in self.compiled if x.is_async)
        share = hidden / self.bytes_per_step if hidden else 0.0
        return (
            f"A step sends {in_mebibytes(self.bytes_per_step)} MiB in {len(self.compiled)} "
            f"collectives, with gradients in {self.plan.in_words}; {share:.0%} of these "
            "bytes can be sent while it computes."
        )

    def as_json(self) -> JsonObject:
        """Verdict, buckets and collectives as values of JSON; sizes are in bytes."""
        return {
            "verdict": self.verdict,
            "num_devices": self.num_devices,
            "platform": self.platform,
            "jax": jax.__version__,
            "bytes_per_step": self.bytes_per_step,
            "buckets": [_bucket_as_json(x) for x in self.plan.buckets],
            "units": [
                _bucket_as_json(x.bucket) | {"num_slices": x.num_slices, "num_passes": x.num_passes}
                for x in self.plan.units
            ],
            "group_size": self.plan.group_size,
            "memory": {name: getattr(self.memory, name) for name in FIELDS},
            "unused": [*self.plan.unused],
            "notes": [*self.plan.notes],
            "collectives": [
                {"for": hlo.purpose_of(x)}
                | x._asdict()
                | {"dtypes": [*x.dtypes], "devices": [*x.devices], "pairs": [*map(list, x.pairs)]}
                for x in self.compiled
            ],
            "prediction": self.prediction and self.prediction.as_json(),
        }

    def _runs(self, collective: hlo.Collective) -> float:
        purpose = hlo.purpose_of(collective)
        return self.sync.runs(
            collective.num_runs or 1,
            is_gradient=purpose == hlo.GRADIENTS,
            is_outer=purpose == hlo.PARAMETERS,
        )

    def __repr__(self) -> str:
        """A verdict, the plan, the compiled collectives, and a summary."""
        lines = [
            *([str(self.prediction), ""] if self.prediction else []),
            *textwrap.wrap(self.verdict, 79),
            "",
            str(self.plan),
            "",
            f"compiled for {self.num_devices} {self.platform} devices, jax {jax.__version__}",
            f"{'number':>6} {'MiB':>9}  {'dtype':<6} {'collective':<18} {'async':<5}  for",
        ]
        form = "{:>6} {:>9}  {:<6} {:<18} {:<5}  {}"
        lines += [form.format(*row) for row in self._rows]
        return "\n".join([*lines, "", *self._sentences()])

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        """Collectives of a kind: number, MiB, dtype, name, whether asynchronous, and purpose."""
        kinds: dict[tuple[str, ...], list[hlo.Collective]] = {}
        for x in self.compiled:
            kind = ",".join(x.dtypes), x.op, "yes" if x.is_async else "no", hlo.purpose_of(x)
            kinds.setdefault(kind, []).append(x)
        return [
            (f"{len(found)}", in_mebibytes(sum(x.bytes for x in found)), *kind)
            for kind, found in kinds.items()
        ]

    def _sentences(self) -> list[str]:
        wire_bytes = self.plan.wire_bytes
        ring_bytes = 2 * (self.num_devices - 1) / self.num_devices * wire_bytes
        moves = f"{in_mebibytes(wire_bytes)} MiB; a ring of {self.num_devices} devices moves"
        into = f"{in_mebibytes(ring_bytes)} MiB into and out of each."
        if not self.sync.rhythm:
            units = [x for x in self.compiled if UNIT in x.op_name]
            if not units:
                return [f"Gradients of an optimizer step are {moves}", into]
            lines = [f"Gradients in buckets are {moves}", into] if wire_bytes else []
            size = in_mebibytes(sum(x.bytes * self._runs(x) for x in units))
            return [
                *lines,
                f"Parameters and gradients of units are {size} MiB a step, each array counted",
                "once for each time that it is sent.",
            ]
        lines = []
        if self.sync.start:
            lines.append(
                f"Each of the first {self.sync.start} steps sends gradients, as many bytes."
            )
        return [
            *lines,
            f"Replicas synchronize {self.sync.rhythm}. Differences of parameters then are",
            f"{moves} {into}",
            "Each array counted once, all collectives are "
            f"{in_mebibytes(self.bytes_per_step)} MiB a step on average.",
        ]


def explain(
    ddp: Trainable,
    batch: Batch,
    *,
    target: str | None = None,
    topology: str = "1x8",
    links: Sequence[str] = (),
    scaling: bool = False,
) -> Explanation:
    """Compiles a step and reports the bytes that it sends, next to the plan; runs nothing.

    With `target`, the step is compiled for GPUs that need not be there, with the rows of the batch
    divided over them, and its time, memory and communication are modelled. It needs the extra
    `aot`. For TPUs, with the extra `tpu`, only memory and collectives are known.

    Args:
      ddp: A `jddp.DataParallel`.
      batch: This process's rows, or their `jax.ShapeDtypeStruct`s.
      target: A GPU: "h100", "h200" or "a100"; TPUs: "v4", "v5e", "v5p" or "v6e"; None for the
        devices of `ddp`.
      topology: Hosts of the target and GPUs of each, "HOSTSxGPUS"; of TPUs the chips, "2x4".
      links: Links that replace the assumed ones, "NAME=BANDWIDTH,LATENCY", such as
        "nvlink=300GB/s,2us" or "nic=25GB/s,14us".
      scaling: Whether to model the step on 1, 8, 32 and 128 hosts too, with as many rows on each.

    Raises:
      ConfigError: If the target, topology or a link is unknown, JAX cannot compile for it here, the
        rows do not divide over it, or the step does not compile for it.
      UsageError: If the step cannot be modelled, or `jddp.workbench` is not installed.
    """
    if target is None:
        return _explained(ddp.steps, batch, ddp.steps.lower(batch).compile())
    model = tool("target", "target=")
    own, prediction = model(ddp.steps, batch, target, topology, links, scaling=scaling)
    return dataclasses.replace(_explained(*own), prediction=prediction)


def _explained(steps: CompiledSteps, batch: Batch, compiled: jax.stages.Compiled) -> Explanation:
    return Explanation(
        plan=steps.sent(batch),
        num_devices=steps.mesh.size,
        platform=platform(steps.mesh),
        compiled=hlo.collectives(hlo.read_program(compiled.as_text() or "")),
        sync=steps.spec.sync,
        memory=assigned_memory(compiled, steps, batch, float("inf")),
    )


def _bucket_as_json(bucket: Bucket) -> JsonObject:
    return {"bytes": bucket.bytes, "dtype": str(bucket.wire_dtype), "parameters": [*bucket.paths]}
