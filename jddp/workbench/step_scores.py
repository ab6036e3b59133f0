"""Scores of the step of a config: its time and memory, modelled for described GPUs or measured.

score = modelled("h100", "1x8")
score(config).seconds
largest_batch(config, score, multiple_of=8)
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jddp.config.files import with_overrides
from jddp.config.schema import Config
from jddp.engine.mesh import platform
from jddp.errors import ConfigError, DataError
from jddp.inspection.explain import explain
from jddp.job.data_rate import TimedStep
from jddp.job.job import Job, build
from jddp.reduce.average import compiler_options
from jddp.workbench.modelled.described import Target

NUM_ROUNDS = 5  # of a comparison on devices


@dataclass(frozen=True)
class Score:
    """A step, modelled or measured.

    Attributes:
      seconds: Time of the step.
      bytes: Memory that it needs on a device.
      limit: Memory of the device; infinite if it is not known.
      exposed_share: Share of the step that waits for gradients and parameters; None if measured.
    """

    seconds: float
    bytes: int
    limit: float
    exposed_share: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.bytes <= self.limit


Scorer = Callable[[Config], Score]


def modelled(gpu: str, topology: str = "1x8", links: Sequence[str] = ()) -> Scorer:
    """Returns a scorer that compiles a step for described GPUs and walks its schedule.

    Raises:
      ConfigError: If they are unknown, or JAX cannot compile for them here.
    """
    mesh = Target.named(gpu, topology, links).mesh()

    def score(config: Config) -> Score:
        job = build(config, needs_data=False, mesh=mesh)
        batch = job.batch_spec
        found = explain(job.ddp, batch, target=gpu, topology=topology, links=links).prediction
        assert found is not None  # There is a target.
        seconds, needed = found.timeline.step_seconds, found.memory
        return Score(seconds, needed.total, needed.limit, found.exposed_share)

    return score


def measured() -> Scorer:
    """Returns a scorer that runs steps on the devices at hand, in turn with those of the first.

    Configs of one program have one score. A step is as fast as the first one if it is faster in
    some rounds and slower in others.
    """
    reference = dict[str, TimedStep]()
    known = dict[str, Score]()

    def score(config: Config) -> Score:
        job = build(config, needs_data=False)
        if (program := _program(job)) not in known:
            own = TimedStep(job)
            first = reference.setdefault("first", own)
            rounds = [(first.seconds(), own.seconds()) for _ in range(NUM_ROUNDS)]
            ratios = sorted(mine / other for other, mine in rounds)
            ratio = 1.0 if ratios[0] <= 1 <= ratios[-1] else statistics.median(ratios)
            base = [x.seconds for x in known.values()] or [statistics.median(x for x, _ in rounds)]
            known[program] = Score(ratio * base[0], own.memory.total, own.memory.limit)
        return known[program]

    return score


def _program(job: Job) -> str:
    """The text of a step, and the options by which it is compiled."""
    steps = job.ddp.steps
    options = compiler_options(steps.spec.reducer, platform(steps.mesh))
    return f"{options} {steps.lower(job.batch_spec).as_text()}"


class LargestBatch(NamedTuple):
    """The largest batch that fits into memory, to three per cent.

    Attributes:
      size: Rows, over all devices.
      score: Time and memory of its step.
      holds_all_data: Whether larger ones were not tried, since the data have fewer examples.
    """

    size: int
    score: Score
    holds_all_data: bool


def largest_batch(config: Config, score: Scorer, *, multiple_of: int) -> LargestBatch:
    """Finds the largest global batch whose step fits into memory, by compiling alone.

    Args:
      config: Config of the job.
      score: Scorer of the step of a config.
      multiple_of: Divisor of the batch, such as devices times micro-batches.

    Raises:
      ConfigError: If not even the smallest fits.
    """
    is_short = False

    def at(multiple: int) -> Score | None:
        nonlocal is_short
        keys = {"data.global_batch_size": multiple * multiple_of}
        try:
            found = score(with_overrides(config, keys))
        except DataError:  # of fewer examples than a batch holds
            is_short = True
            return None
        return found if found.fits else None

    own = score(with_overrides(config, {"data.global_batch_size": multiple_of}))
    if not own.fits:
        raise ConfigError(
            f"A batch of {multiple_of} rows needs {own.bytes / 1e9:.1f} GB of a device, which "
            f"has {own.limit / 1e9:.1f} GB. Try ddp.strategy=fsdp or ddp.precision=bfloat16."
        )
    best, fitting, above = own, 1, 2
    while found := at(above):
        best, fitting, above = found, above, 2 * above
    while above - fitting > max(1, fitting // 32):
        middle = (fitting + above) // 2
        if found := at(middle):
            best, fitting = found, middle
        else:
            above = middle
    return LargestBatch(fitting * multiple_of, best, is_short)
