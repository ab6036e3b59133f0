"""Finds the keys with which a job's step is fastest: compiles candidates, and scores them.

    found = tune(config, modelled("h100", "1x8"), "modelled for 8 x H100")
    print(found)                     # a table, and the keys of the best
    found.best.keys                  # {"ddp.reduction.bucket_mb": [1.0, 50.0]}

Only keys that leave the batch and the loss as they are are tried: results are the same but for
rounding, and for the masks of dropout. One key is varied after another, each from the best so far.
Transformers of the zoo are also asked for what their backward pass computes again, and for their
micro-batches. No other model is: micro-batches change the statistics of batch norm.

A score is the time and the memory of a step, modelled for described GPUs or measured here.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import jax
import numpy as np

from jddp.config.files import dump_values, nested, with_overrides
from jddp.config.schema import Config
from jddp.ground.errors import ConfigError, DataError, Error
from jddp.ground.typing import JsonObject, Settings, Shown
from jddp.inspection.explain import explain
from jddp.inspection.memory import memory
from jddp.trainer.job.build import Job, build
from jddp.workbench.described import Target

NUM_ROUNDS = 5  # Rounds of a comparison on devices.
NUM_STEPS = 4  # Steps that are timed at once.


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


class TimedStep:
    """A job's step, compiled, on rows of ones."""

    def __init__(self, job: Job) -> None:
        self._ddp = job.ddp
        rows = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), job.batch_spec)
        self._batch = job.ddp.shard_batch(rows)
        self._state = job.ddp.init(0, self._batch)
        self.memory = memory(job.ddp, self._batch)
        self.seconds()

    def seconds(self) -> float:
        """The time of a step, on average over a few."""
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            self._state, metrics = self._ddp.step(self._state, self._batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - start) / NUM_STEPS


def measured() -> Scorer:
    """Returns a scorer that runs steps on the devices at hand, alternating with the first config.

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
    """The text of a step, and the layout of its buckets, on which the compiler's options depend."""
    steps = job.ddp.steps
    return f"{steps.spec.reducer.packing.layout} {steps.lower(job.batch_spec).as_text()}"


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
        except DataError:  # The data have fewer examples than a batch holds.
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


AS_IT_IS = "the config as it is"
_SAME = 1.001  # Ratio up to which times are equal: candidates may give the same buckets.
TILES = (2048, 1024, 4096)  # The first is the default of `next_token`.
TRANSFORMERS = ("gpt", "gpt2", "vit", "vit_b16")
BUCKETS = ([1.0, 10.0], [1.0, 50.0], [1.0, 100.0], [5.0, 25.0], [25.0], [100.0], [1000.0])


@dataclass(frozen=True)
class Candidate:
    """Keys of a config, and the step that they give.

    Attributes:
      keys: Values by dotted key; none for the config as it is.
      score: The step; None if the keys are refused.
      refused: Reason why they are.
    """

    keys: Settings
    score: Score | None
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Time of the step; infinite if it is refused or too large."""
        return self.score.seconds if self.score and self.score.fits else math.inf

    def __str__(self) -> str:
        """The keys, without the sections that all have in common."""
        values = (f"{key}={value}".replace(" ", "") for key, value in self.keys.items())
        return " ".join(word.removeprefix("ddp.reduction.") for word in values)


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """All candidates that were tried; its `str` fits a terminal of 80 columns.

    Attributes:
      how: "modelled" or "measured", and the devices.
      candidates: All that were tried, in order; the first is the config as it is.
      num_left: Candidates that were not tried, for want of time.
    """

    how: str
    candidates: tuple[Candidate, ...]
    num_left: int = 0

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits; the config, unless one is faster by a thousandth."""
        own, best = self.candidates[0], min(self.candidates, key=lambda x: x.seconds)
        return own if own.seconds <= _SAME * best.seconds else best

    @property
    def verdict(self) -> str:
        """The gain, in one sentence."""
        own, best = self.candidates[0], self.best
        if math.isinf(best.seconds):
            return "No candidate fits into the memory of a device: try fewer rows, or fsdp."
        if not best.keys:
            return "The config is as fast as any candidate."
        if math.isinf(own.seconds):
            return f"The config does not fit as it is; {best} does."
        return f"{best} is {own.seconds / best.seconds:.3f} times as fast as the config."

    @property
    def fragment(self) -> str:
        """The keys of the best as YAML, to be given as one more `--config`."""
        return dump_values(nested(self.best.keys)) if self.best.keys else ""

    def as_json(self) -> JsonObject:
        """The same as values of JSON, in seconds and bytes."""
        return {
            "verdict": self.verdict,
            "how": self.how,
            "best": dict(self.best.keys),
            "num_left": self.num_left,
            "candidates": [
                {"keys": dict(x.keys), "refused": x.refused}
                | (asdict(x.score) | {"limit": _finite(x.score.limit)} if x.score else {})
                for x in self.candidates
            ],
        }

    def __repr__(self) -> str:
        """The verdict, a table with the fastest first, and the keys of the best."""
        ranked = sorted((x for x in self.candidates if x.score), key=lambda x: x.seconds)
        lines = [self.verdict, "", self.how, f"{'step ms':>10} {'waits':>7} {'GB':>6}  keys"]
        lines += map(_row, ranked)
        lines += [f"refused: {x}: {x.refused}" for x in self.candidates if x.refused]
        if self.num_left:
            lines.append(f"not tried, for want of time: {self.num_left} or more")
        return "\n".join([*lines, *(["", self.fragment.rstrip()] if self.best.keys else [])])


def tune(
    config: Config,
    score: Scorer,
    how: str,
    *,
    seconds: float = 600.0,
    note: Callable[[Candidate], None] = lambda candidate: None,
) -> Tuned:
    """Tries candidates until all are tried or the time is over.

    Args:
      config: Config of the job.
      score: Scorer of the step of a config: `modelled` or `measured`.
      how: Description of the scorer, for people.
      seconds: Time after which no further candidate is begun.
      note: Function that is called with each candidate once it is scored.

    Raises:
      Error: If the config is refused as it is.
    """
    until = time.monotonic() + seconds
    tried = [Candidate({}, score(config))]
    note(tried[0])
    num_left = 0
    for key, values in _choices(config):
        best = min(tried, key=lambda x: x.seconds)
        for value in values:
            if time.monotonic() > until:
                num_left += 1
                continue
            tried.append(_attempt(config, {**best.keys, key: value}, score))
            note(tried[-1])
    return Tuned(how, tuple(tried), num_left)


def _choices(config: Config) -> Iterator[tuple[str, list[object]]]:
    """Keys and the values to try, without the values of the config."""
    reduction, strategy = config.ddp.reduction, config.ddp.strategy
    known: dict[str, tuple[object, Sequence[object]]] = {}
    if config.model.name in TRANSFORMERS:
        remat = config.model.kwargs.get("remat", "none")
        word = {True: "blocks", False: "none"}.get(remat, remat)
        known["model.kwargs.remat"] = (word, ("none", "attention", "blocks"))
        known["ddp.accumulate_steps"] = (config.ddp.accumulate_steps, (1, 2, 4, 8))
    if config.loss.name == "next_token":
        size = config.loss.kwargs.get("tile_size", TILES[0])
        known["loss.kwargs.tile_size"] = (size, TILES)
    known |= {
        "ddp.reduction.bucket_mb": (reduction.bucket_mb, BUCKETS),
        "ddp.reduction.layout": (reduction.layout, ("leaf", "flat")),
        "ddp.reduction.overlap": (reduction.overlap, (True, False)),
    }
    if strategy.name == "fsdp":
        known["ddp.strategy.regather"] = (strategy.regather, (True, False))
    for key, (own, values) in known.items():
        yield key, [value for value in values if value != own]


def _attempt(config: Config, keys: Settings, score: Scorer) -> Candidate:
    try:
        return Candidate(keys, score(with_overrides(config, keys)))
    except (Error, jax.errors.JaxRuntimeError) as error:  # Options may exclude each other.
        return Candidate(keys, None, " ".join(str(error).split()))


def _row(candidate: Candidate) -> str:
    score = candidate.score
    assert score is not None
    share = score.exposed_share
    waits = "" if share is None else f"{share:.1%}"
    name = (str(candidate) or AS_IT_IS) + ("" if score.fits else "  does not fit")
    return f"{1e3 * score.seconds:>10.2f} {waits:>7} {score.bytes / 1e9:>6.1f}  {name}"


def _finite(limit: float) -> float | None:
    return None if math.isinf(limit) else limit
