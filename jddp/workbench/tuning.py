"""Finds the keys with which a job's step is fastest: compiles candidates, and scores them.

    found = tune(config, modelled("h100", "1x8"), "modelled for 8 x H100")
    print(found)                     # a table, and the keys of the best
    found.best.keys                  # {"ddp.reduction.bucket_mb": [1.0, 50.0]}

Only keys that change what is sent, and when, are tried: results are the same but for rounding. One
key is varied after another, each from the best so far.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import jax

from jddp.config.files import dump_values, nested, with_overrides
from jddp.config.schema import Config
from jddp.errors import Error
from jddp.typing import JsonObject, Settings, Shown
from jddp.workbench.step_scores import Score, Scorer

AS_IT_IS = "the config as it is"
_SAME = 1.001  # Ratio up to which times are equal: candidates may give the same buckets.
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
    """Keys and the values to try, without those that the config has."""
    reduction, strategy = config.ddp.reduction, config.ddp.strategy
    known = {
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
    except (Error, jax.errors.JaxRuntimeError) as error:  # such as options that exclude each other
        return Candidate(keys, None, " ".join(str(error).split()))


def _row(candidate: Candidate) -> str:
    score = candidate.score
    assert score is not None
    share = score.exposed_share
    waits = "" if share is None else f"{share:.1%}"
    name = str(candidate) or AS_IT_IS
    too_large = "" if score.fits else "  does not fit"
    return f"{1e3 * score.seconds:>10.2f} {waits:>7} {score.bytes / 1e9:>6.1f}  {name}{too_large}"


def _finite(limit: float) -> float | None:
    return None if math.isinf(limit) else limit
