"""Describes every mistake in a config in one line: key, value, rule and suggestion.

pydantic finds all mistakes at once and describes each in several lines; here each becomes a
`Mistake`, whose key `files` can trace to the file that set it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from jddp.config.keys import KeyPath, is_at, keys_of
from jddp.errors import ConfigError
from jddp.names import did_you_mean
from jddp.names.synonyms import KEYS


class Mistake(NamedTuple):
    """A mistake in one key, with the path to it from the top of the config."""

    path: KeyPath
    text: str


class ConfigMistakes(ConfigError):
    """All mistakes in a config: `mistakes`, and as text one line each."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(mistake.text for mistake in mistakes))
        self.mistakes = list(mistakes)


def describe_mistakes(error: ValidationError, schema: type[BaseModel]) -> list[Mistake]:
    """Returns one mistake for each key in `error`, in the order of the schema."""
    keys = list(keys_of(schema))
    complaints: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        place = tuple(map(str, detail["loc"]))
        # Behind a key pydantic adds the branch of a union that was tried.
        path = next((place[: len(key)] for key in keys if is_at(key, place)), place)
        complaints.setdefault(path, []).append(detail)
    return [Mistake(path, _sentence(path, found, keys)) for path, found in complaints.items()]


def _sentence(path: KeyPath, details: list[Any], keys: Sequence[KeyPath]) -> str:
    key = ".".join(path)
    detail = details[0]
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}.{_nearest_key(path, keys)}"
        case "value_error":
            return f"{key}: {detail['ctx']['error']}."
        case "model_type" | "model_attributes_type":
            return f"{key} must be a section of keys, not {detail['input']!r}."
    rules = [d["msg"].removeprefix("Input should be ") for d in details]
    return f"{key} must be {' or '.join(dict.fromkeys(rules))}, not {detail['input']!r}."


def _nearest_key(path: KeyPath, keys: Sequence[KeyPath]) -> str:
    """Suggests the key that is meant.

    It is that of a name of another trainer; else a sibling; else the full path of a key of like
    name in another section.
    """
    *above, name = path
    depth = len(above)
    siblings = {x[depth] for x in keys if len(x) > depth and is_at(x[:depth], tuple(above))}
    if (key := KEYS.get(name)) is not None:
        last = key.rpartition(".")[2]
        return f" Did you mean {last if last in siblings else key!r}?"
    elsewhere = KEYS | {key[-1]: ".".join(key) for key in reversed(keys)}
    return did_you_mean(name, siblings) or did_you_mean(name, elsewhere)
