"""A step on GPUs that are not there: its time, memory and communication, as modelled.

    found = predict(target, compile_for(target, ddp.steps, rows))
    print(found.verdict)

Nothing here is measured. `schedule` gives the time of computing, `links` the time of collectives,
and the compiled program their order.

Weak scaling compiles a step for one host and for eight. More hosts run the program of eight, whose
collectives take as long as they would over all hosts. `benchmarks/predictions.py` compares the
same arithmetic with published runs, which reach less.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import jax

from jddp.engine.compiled import CompiledSteps
from jddp.ground.errors import ConfigError
from jddp.ground.typing import Batch, JsonObject, Shown
from jddp.inspection.hlo import HloProgram, bucket_of, is_backward, purpose_of
from jddp.inspection.memory import Memory, assigned_memory
from jddp.reduce.plan import BucketPlan
from jddp.workbench.described import CompiledFor, Target, compile_for, num_rows, rows_of_host
from jddp.workbench.described_tpus import StepOnTpus, TpuSlice, described, step_on_tpus
from jddp.workbench.links import START_SECONDS, Choice, Fabric
from jddp.workbench.schedule import Timeline, Transfer, walk
from jddp.workbench.trace import MODELLED, StepTimes, in_ms


@dataclass(frozen=True)
class TransferGroup:
    """The runs of one bucket's or unit's collective, or of all other collectives of a kind.

    Attributes:
      label: "bucket 3" or "unit 3", numbered as in the plan; or empty.
      purpose: Use of the values that it sends.
      paths: Names of the parameters.
      choices: Algorithm that is assumed for each run.
      transfers: The runs, in order.
    """

    label: str
    purpose: str
    paths: tuple[str, ...]
    choices: tuple[Choice, ...]
    transfers: tuple[Transfer, ...]

    @property
    def op(self) -> str:
        """Name of the collective."""
        return self.transfers[0].op

    @property
    def dtype(self) -> str:
        """Dtypes on the wire."""
        return ",".join(dict.fromkeys(self.transfers[0].collectives[0].dtypes))

    @property
    def bytes(self) -> int:
        """Bytes of all runs."""
        return sum(x.bytes for x in self.transfers)

    @property
    def choice(self) -> Choice:
        """The algorithm of the longest run."""
        return max(self.choices, key=lambda choice: choice.seconds)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each GPU sends in all runs."""
        return sum(x.sent_bytes for x in self.choices)

    @property
    def host_bytes(self) -> float:
        """Bytes that each host sends to other hosts in all runs."""
        return sum(x.host_bytes for x in self.choices)

    @property
    def needed_seconds(self) -> float:
        """Time that all runs are under way."""
        return sum(x.needed_seconds for x in self.transfers)

    @property
    def waited_seconds(self) -> float:
        """Time that computing stands still for them."""
        return sum(x.waited_seconds for x in self.transfers)

    @property
    def name(self) -> str:
        """The first and the last parameter; or else the purpose."""
        ends = dict.fromkeys((self.paths[0], self.paths[-1])) if self.paths else (self.purpose,)
        return " .. ".join(ends)


def group_transfers(
    timeline: Timeline, plan: BucketPlan, fabric: Fabric
) -> tuple[TransferGroup, ...]:
    """Groups the transfers of a timeline, in the order in which they first start.

    A gather of parameters does not name its bucket or unit: it is the one of its size that comes
    next in the plan, or in the backward pass before.
    """
    planned = _Planned(plan)
    by_name: dict[str, list[Transfer]] = {}
    for transfer in sorted(timeline.transfers, key=lambda x: x.started_at):
        by_name.setdefault(transfer.name, []).append(transfer)
    found, others = list[TransferGroup](), dict[tuple[str, str], list[Transfer]]()
    for transfers in by_name.values():
        first = transfers[0]
        purpose = purpose_of(first.collectives[0])
        number = planned.number(first, purpose)
        if number is None:
            others.setdefault((purpose, first.op), []).extend(transfers)
        else:
            label, paths = planned.label(number), planned.items[number].paths
            found.append(_group(label, purpose, paths, transfers, fabric))
    rest = (_group("", purpose, (), each, fabric) for (purpose, _), each in others.items())
    return (*found, *rest)


def _group(
    label: str, purpose: str, paths: tuple[str, ...], runs: Sequence[Transfer], fabric: Fabric
) -> TransferGroup:
    choices = [fabric.among(x.collectives[0].devices).best(x.bytes, x.op) for x in runs]
    return TransferGroup(label, purpose, paths, tuple(choices), tuple(runs))


class _Planned:
    """The buckets and units of a plan, and which of them have been found in a program."""

    def __init__(self, plan: BucketPlan) -> None:
        self.num_buckets = len(plan)
        self.items = (*plan.buckets, *(x.bucket for x in plan.units))
        self._taken: dict[str, set[int]] = {}

    def label(self, number: int) -> str:
        if number < self.num_buckets:
            return f"bucket {number}"
        return f"unit {number - self.num_buckets}"

    def number(self, transfer: Transfer, purpose: str) -> int | None:
        sent = transfer.collectives[0]
        if (bucket := bucket_of(sent)) is not None:
            return bucket if bucket < self.num_buckets else None
        if not purpose.startswith(("parameters", "gradients")):
            return None
        taken = self._taken.setdefault(purpose, set())
        fitting = [x for x in self._fitting(sent.num_elements) if x not in taken]
        if not fitting:
            return None
        number = fitting[-1 if is_backward(sent.op_name) else 0]
        taken.add(number)
        return number

    def _fitting(self, num_elements: int) -> Iterator[int]:
        """Numbers of the items with as many elements; the elements may have been padded."""
        for number, item in enumerate(self.items):
            if item.size <= num_elements <= 1.02 * item.size + 1024:
                yield number


NUM_HOSTS = (1, 8, 32, 128)
COMPILED = (1, 8)
# Points of efficiency: the median and the worst case of benchmarks/predictions.py.
MEASURED_ERROR = "published runs reach 8.5 points less, at worst 28.8"


@dataclass(frozen=True)
class ScaledStep:
    """A step on some number of hosts.

    Attributes:
      num_devices: GPUs of all hosts.
      step_seconds: Time of the step.
      waiting_share: The share of it that waits for any collective.
      efficiency: Time of the step on one host, divided by its time here.
      compiled_for: GPUs for which its program was compiled.
    """

    num_devices: int
    step_seconds: float
    waiting_share: float
    efficiency: float
    compiled_for: int

    @property
    def origin(self) -> str:
        """Where its schedule is from."""
        if self.compiled_for == self.num_devices:
            return "compiled"
        return f"the schedule of {self.compiled_for} GPUs"


def weak_scaling(target: Target, steps: CompiledSteps, own: CompiledFor) -> tuple[ScaledStep, ...]:
    """Models a step on 1, 8, 32 and 128 hosts, with the rows that each host has.

    Args:
      target: The GPUs and links of one world.
      steps: The step.
      own: The step as compiled for that world.

    Raises:
      ConfigError: If the step is refused on one host, or on eight.
    """
    programs = {num: _program(target, num, steps, own) for num in COMPILED}
    return tuple(_scaled(target, programs))


def _program(target: Target, num_hosts: int, steps: CompiledSteps, own: CompiledFor) -> HloProgram:
    if num_hosts == target.fabric.num_hosts:
        return own.program
    other = _resized(target, num_hosts)
    try:
        return compile_for(other, steps, own.rows).program
    except ConfigError as error:  # A group may have more GPUs than a host.
        raise ConfigError(f"Scaling needs the step for {other} too. {error}") from error


def _resized(target: Target, num_hosts: int, num_stretched: int = 1) -> Target:
    fabric = replace(target.fabric, num_hosts=num_hosts, num_stretched=num_stretched)
    return replace(target, fabric=fabric)


def _scaled(target: Target, programs: dict[int, HloProgram]) -> Sequence[ScaledStep]:
    found: list[ScaledStep] = []
    for num_hosts in NUM_HOSTS:
        compiled = max(x for x in COMPILED if x <= num_hosts)
        world = _resized(target, num_hosts, num_hosts // compiled)
        time = walk(programs[compiled], world.gpu, world.fabric)
        first = found[0].step_seconds if found else time.step_seconds
        found.append(
            ScaledStep(
                num_devices=world.fabric.num_devices,
                step_seconds=time.step_seconds,
                waiting_share=1 - time.compute_seconds / time.step_seconds,
                efficiency=first / time.step_seconds,
                compiled_for=compiled * world.fabric.devices_per_host,
            )
        )
    return found


MEGABYTE = 10**6


@dataclass(frozen=True, repr=False)
class Prediction(Shown):
    """A modelled step; its `str` fits a terminal of 80 columns.

    Attributes:
      target: The GPUs and their links.
      plan: The buckets.
      timeline: The schedule, walked.
      groups: Transfers by bucket.
      memory: Memory on each GPU.
      num_rows: Rows of one GPU and micro-batch.
      accumulate_steps: Micro-batches of a step.
      rhythm: "every N steps", where replicas synchronize in these alone; else "".
      scaling: The step on more and on fewer hosts, with as many rows on each, if it was asked for.
    """

    target: Target
    plan: BucketPlan
    timeline: Timeline
    groups: tuple[TransferGroup, ...]
    memory: Memory
    num_rows: int
    accumulate_steps: int
    rhythm: str = ""
    scaling: tuple[ScaledStep, ...] = ()

    @property
    def planned(self) -> tuple[TransferGroup, ...]:
        """The groups that send gradients or parameters."""
        return tuple(x for x in self.groups if x.purpose.startswith(("gradients", "parameters")))

    @property
    def exposed_share(self) -> float:
        """The share of the step that waits for gradients and parameters."""
        return sum(x.waited_seconds for x in self.planned) / self.timeline.step_seconds

    @property
    def other_exposed_share(self) -> float:
        """The share that waits for anything else: metrics, statistics of batch norm."""
        waited = sum(x.waited_seconds for x in self.groups)
        return waited / self.timeline.step_seconds - self.exposed_share

    @property
    def sent_bytes(self) -> float:
        """Bytes that each GPU sends in a step."""
        return sum(x.sent_bytes for x in self.groups)

    @property
    def times(self) -> StepTimes:
        """Where the time of a step goes."""
        time = self.timeline
        exposed = time.step_seconds - time.compute_seconds
        return StepTimes(MODELLED, time.step_seconds, time.compute_seconds, exposed)

    @property
    def verdict(self) -> str:
        """Whether the step fits; then its bytes sent, and the time that it waits for them."""
        others = self.other_exposed_share
        rest = f", and {others:.1%} for other values," if others >= 0.0005 else ""
        when = self.rhythm and f", for the step that synchronizes replicas {self.rhythm}"
        step = (
            f"Modelled{when}: {self._sent_in_words} {self.exposed_share:.1%} of the step "
            f"waits for them{rest} on {self.target}."
        )
        return step if self.memory.fits else f"{self._too_large} {step}"

    @property
    def _sent_in_words(self) -> str:
        if not self.planned:
            return "no gradients are sent, and"
        megabytes = sum(x.bytes for x in self.planned) / MEGABYTE
        size = f"{megabytes:,.0f} MB" if megabytes >= 10 else f"{megabytes:.2g} MB"
        if {x.purpose for x in self.planned} != {"gradients"}:
            nouns = sorted({x.purpose.partition(",")[0] for x in self.planned})
            num = sum(len(x.transfers) for x in self.planned)
            collectives = "1 collective" if num == 1 else f"{num} collectives"
            return f"{' and '.join(nouns)} of {size} are sent in {collectives};"
        widths = {x.wire_dtype.itemsize * 8 for x in self.plan.buckets}
        width = f"{widths.pop()}-bit " if len(widths) == 1 else ""
        return f"{width}gradients of {size} leave in {self.plan.in_words};"

    @property
    def _too_large(self) -> str:
        needs, has = self.memory.total / 1e9, self.memory.limit / 1e9
        cut = next(self.memory.cuts(self.num_rows), None)
        needed = self.memory.fixed + (self.memory.batch + self.memory.temporaries) / (cut or 1)
        way = (
            f"accumulate_steps={self.accumulate_steps * cut} is estimated to fit "
            f"({needed / 1e9:.1f} GB)."
            if cut
            else 'No number of micro-batches would do: try strategy="fsdp", more GPUs or a smaller '
            "model."
        )
        return f"Does not fit: a step needs {needs:.1f} GB of a GPU, which has {has:.1f} GB. {way}"

    def as_json(self) -> JsonObject:
        """The same as numbers and words, in bytes and seconds."""
        fabric = self.target.fabric
        return {
            "verdict": self.verdict,
            "is_modelled": True,
            "gpu": self.target.gpu.name,
            "num_hosts": fabric.num_hosts,
            "devices_per_host": fabric.devices_per_host,
            "step_seconds": self.timeline.step_seconds,
            "compute_seconds": self.timeline.compute_seconds,
            "exposed_share": self.exposed_share,
            "other_exposed_share": self.other_exposed_share,
            "sent_bytes_per_device": self.sent_bytes,
            "memory_bytes": self.memory.total,
            "memory_limit_bytes": self.memory.limit,
            "links": {name: asdict(link) for name, link in fabric.links.items()},
            "weak_scaling": [asdict(x) for x in self.scaling],
            "transfers": [_group_as_json(x) for x in self.groups],
        }

    def __repr__(self) -> str:
        """The verdict, the figures, the transfers, and the assumptions."""
        parts = [
            textwrap.wrap(self.verdict, 79),
            self._figures(),
            self._scaled(),
            self._sent(),
            self._assumed(),
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _figures(self) -> list[str]:
        times, fabric = self.times, self.target.fabric
        rows = {
            "step": f"{in_ms(times.step)}, of which computing {in_ms(times.compute)} "
            f"and waiting {in_ms(times.exposed)}",
            "waits for": f"gradients and parameters {self.exposed_share:.2%}, "
            f"others {self.other_exposed_share:.2%} of the step",
            "sends": f"{self.sent_bytes / MEGABYTE:,.1f} MB from each GPU in a step",
            "memory": f"{self.memory.total / 1e9:.1f} of {self.memory.limit / 1e9:.1f} GB of a GPU",
        }
        head = f"modelled: {fabric.num_hosts} x {fabric.devices_per_host} {self.target.gpu.name}"
        return [f"{head}, jax {jax.__version__}", *(f"  {name:<10}{x}" for name, x in rows.items())]

    def _scaled(self) -> list[str]:
        lines = [
            f"{x.num_devices:>6} {in_ms(x.step_seconds):>13} {x.waiting_share:>7.2%} "
            f"{x.efficiency:>10.1%}  {x.origin}"
            for x in self.scaling
        ]
        head = f"{'GPUs':>6} {'step':>13} {'waits':>7} {'efficiency':>10}  program"
        return [f"weak scaling, modelled: {MEASURED_ERROR}", head, *lines] if lines else []

    def _sent(self) -> list[str]:
        lines = [
            f"{'sent':<9} {'runs':>4} {'MB':>8} {'collective':<14} {'algorithm':<12} "
            f"{'takes ms':>8} {'waits ms':>8}"
        ]
        for x in self.groups:
            size = f"{x.bytes / MEGABYTE:8,.2f} {x.op:<14} {x.choice.algorithm:<12}"
            times = f"{1e3 * x.needed_seconds:8.3f} {1e3 * x.waited_seconds:8.3f}"
            lines.append(f"{x.label or 'other':<9} {len(x.transfers):>4} {size} {times}")
            lines.append(f"  {x.name if len(x.name) <= 77 else '...' + x.name[-74:]}")
        return lines

    def _assumed(self) -> list[str]:
        gpu = self.target.gpu
        rates = (
            f"products {gpu.product_flops / 1e12:.0f} TFLOP/s, convolutions "
            f"{gpu.convolution_flops / 1e12:.0f}, memory {gpu.bytes_per_second / 1e12:.1f} TB/s"
        )
        lines = [f"{'assumed link':<13} {'GB/s':>6} {'us a hop':>8}  source"]
        for name, link in self.target.fabric.links.items():
            figures = f"{link.bytes_per_second / 1e9:6.1f} {1e6 * link.hop_seconds:8.2f}"
            lines.append(f"{name:<13} {figures}  {link.source}")
        simple, low = (1e6 * x for x in START_SECONDS.values())
        start = f"A collective starts in {simple:g} us, in LL in {low:g} us."
        return [*lines, f"{start} Other links:", "  --link nic=25GB/s,14us", f"A GPU: {rates}."]


def model_step(
    steps: CompiledSteps,
    batch: Batch,
    gpu: str,
    topology: str,
    links: Sequence[str],
    *,
    scaling: bool,
) -> tuple[CompiledFor, Prediction | StepOnTpus]:
    """Compiles and models a step for described devices; arguments and errors: `jddp.explain`.

    Returns:
      The step as it was compiled, and as it is modelled.
    """
    target = described(gpu, topology, links)
    own = compile_for(target, steps, rows_of_host(target, steps, batch))
    if isinstance(target, TpuSlice):
        return own, step_on_tpus(target, own)
    prediction = predict(target, own)
    if scaling:
        rows = weak_scaling(target, steps, own)
        prediction = replace(prediction, scaling=rows)
    return own, prediction


def predict(target: Target, own: CompiledFor) -> Prediction:
    """Walks the schedule of a step that was compiled for a target.

    Raises:
      UsageError: If the program holds an instruction that cannot be modelled.
    """
    timeline = walk(own.program, target.gpu, target.fabric)
    plan = own.steps.sent(own.rows)
    split = own.steps.rows
    return Prediction(
        target=target,
        plan=plan,
        timeline=timeline,
        groups=group_transfers(timeline, plan, target.fabric),
        memory=assigned_memory(own.compiled, own.steps, own.rows, target.gpu.memory_bytes),
        num_rows=max(1, num_rows(own.rows) // split.num_local_micro_batches),
        accumulate_steps=split.accumulate_steps,
        rhythm=own.steps.spec.sync.rhythm,
    )


def _group_as_json(group: TransferGroup) -> JsonObject:
    return {
        "label": group.label,
        "purpose": group.purpose,
        "parameters": [*group.paths],
        "collective": group.op,
        "dtype": group.dtype,
        "bytes": group.bytes,
        "num_runs": len(group.transfers),
        "algorithm": group.choice.algorithm,
        "hops": group.choice.hops,
        "sent_bytes_per_device": group.sent_bytes,
        "sent_bytes_per_host": group.host_bytes,
        "assumed_bytes_per_second": group.choice.bytes_per_second,
        "needed_seconds": group.needed_seconds,
        "waited_seconds": group.waited_seconds,
    }
