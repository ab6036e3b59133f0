"""The points of a sweep: the product of the values that keys are given, each with a short name.

    sweep = Sweep.parse(["seed=0,1,2", "optimizer.learning_rate=1e-3,3e-3", "train.num_steps=20"])
    [point.name for point in sweep.points()]  # ["seed=0,learning_rate=1e-3", ...], 6 names

A key with one value changes all points and is no part of their names. Nothing is read or run here.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import yaml

from jddp.errors import ConfigError

LONGEST = 40  # characters of a value in a name


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
      name: Name of its directory.
      overrides: The keys and values of all that the sweep gives, `key.path=value`.
    """

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """Keys of a config, and the values that each takes.

    Attributes:
      values: Values by key, as they were typed.
    """

    values: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Sweep":
        """Reads `key.path=value,value`; a comma in brackets or quotes is a part of a value.

        Raises:
          ConfigError: If a word has another form, or the directory of the runs is varied.
        """
        values = dict(map(_key_and_values, words))
        if len(values.get("run.dir", ())) > 1:
            raise ConfigError("--sweep run.dir: it is the folder of all runs. Give one value.")
        return cls(values)

    @property
    def num_points(self) -> int:
        """Number of runs."""
        return math.prod(map(len, self.values.values()))

    def points(self) -> Iterator[Point]:
        """All points; the values of the last key change first."""
        return (self._point(chosen) for chosen in itertools.product(*self.values.values()))

    def samples(self) -> Iterator[Point]:
        """A few points, in which each value occurs: as many mistakes as the product has."""
        first = [values[0] for values in self.values.values()]
        yield self._point(first)
        for i, values in enumerate(self.values.values()):
            for value in values[1:]:
                yield self._point([*first[:i], value, *first[i + 1 :]])

    def _point(self, chosen: Sequence[str]) -> Point:
        keys = [*self.values]
        varied = [(k, x) for k, x in zip(keys, chosen, strict=True) if len(self.values[k]) > 1]
        name = ",".join(f"{self._short(key)}={_label(value)}" for key, value in varied)
        overrides = (f"{key}={value}" for key, value in zip(keys, chosen, strict=True))
        return Point(name or "run", tuple(overrides))

    def _short(self, key: str) -> str:
        """The last part of a key, if no other key ends in it."""
        last = key.rpartition(".")[2]
        return last if sum(x.rpartition(".")[2] == last for x in self.values) == 1 else key


def _key_and_values(word: str) -> tuple[str, tuple[str, ...]]:
    key, equals, text = word.partition("=")
    values = _split(text)
    if not (key and equals and values):
        raise ConfigError(
            f"--sweep {word!r}: not of the form key.path=value,value, e.g. seed=0,1,2. Quote a "
            "value that has a comma or a brace of its own."
        )
    return key, tuple(dict.fromkeys(values))


def _split(text: str) -> list[str]:
    """The values of a list in YAML, as they stand there; none if it cannot be read."""
    listed = f"[{text}]"
    try:
        node = yaml.compose(listed, yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(listed):
        return []
    return [listed[x.start_mark.index : x.end_mark.index] for x in node.value]


def _label(value: str) -> str:
    """A value as a part of a file name; with a digest, if that changes or shortens it."""
    label = re.sub(r"[^\w.+-]+", "_", value).strip("_")[:LONGEST]
    return label if label == value else f"{label}-{hashlib.sha256(value.encode()).hexdigest()[:6]}"
