"""The path of every key of a config, and each mistake in one line: key, value, rule and suggestion.

`NAME` in a path stands for any name, in a section that may occur several times. Pydantic finds all
mistakes at once and describes each in several lines; here each becomes a `Mistake`, whose key
`files` can trace to the file that set it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from jddp.ground.errors import ConfigError
from jddp.ground.names import did_you_mean
from jddp.ground.names.synonyms import KEYS

KeyPath = tuple[str, ...]
Schema = type[BaseModel]
ANY = "NAME"
# Keys of earlier versions with their defaults, which are left out of a file; another value is an
# unknown key, and a run that had one resumes if `checkpoint.allow_changed` has the key.
REMOVED: dict[str, object] = {
    "checkpoint.best_mode": "auto",
    "checkpoint.keep_best": 1,
    "checkpoint.start_from": None,
    "data.allow_changed": False,
    "data.cutmix": None,
    "data.mixup": None,
    "data.source": "embedded",
    "data.transform_on": "device",
    "ddp.strategy.outer.learning_rate": 1.0,
    "loss.class_weights": None,
    "loss.eval_kwargs": {},
    "optimizer.decay_norms_and_biases": False,
    "optimizer.layer_decay": {"factor": 1.0, "layers": []},
    "report.norms_every_steps": None,
    "train.check_evaluation": True,
    "train.log_every_epochs": None,
    "train.stop": dict(metric=None, patience=3, mode="auto", min_delta=0.0),
    "watchdog.compile_seconds": 3600,
    "watchdog.evaluation_seconds": 3600,
    "watchdog.other_seconds": None,
    "watchdog.save_seconds": 3600,
    "watchdog.start_seconds": 1800,
}


def keys_of(schema: Schema, above: KeyPath = ()) -> dict[KeyPath, FieldInfo]:
    """Returns every plain key by its path, section by section."""
    keys: dict[KeyPath, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        path = (*above, name)
        kind = field.annotation
        if field.description is None and get_args(kind):  # Sections by name.
            path = (*path, ANY)
            kind = get_args(kind)[1]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys |= keys_of(kind, path)
        else:
            keys[path] = field
    return keys


def is_at(key: KeyPath, place: KeyPath) -> bool:
    """Whether a place in nested values belongs to a key, or to a value inside the key's value."""
    return len(key) <= len(place) and all(x in (ANY, y) for x, y in zip(key, place, strict=False))


def describe_keys(schema: Schema) -> str:
    """Returns every key with its default and, on a line below, its meaning."""
    lines = []
    for path, field in keys_of(schema).items():
        default = field.get_default(call_default_factory=True)
        shown = "null" if default is None else str(default)
        lines += [f"{'.'.join(path)} = {shown}", f"    {field.description}"]
    return "\n".join(lines)


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
        # Pydantic adds the branch of a union that it tried after the key.
        path = next((place[: len(key)] for key in keys if is_at(key, place)), place)
        if detail["type"] in ("missing", "extra_forbidden"):  # In a section of a list.
            path = place
        complaints.setdefault(path, []).append(detail)
    return [Mistake(path, _sentence(path, found, keys)) for path, found in complaints.items()]


def _sentence(path: KeyPath, details: list[Any], keys: Sequence[KeyPath]) -> str:
    key = ".".join(path)
    detail = details[0]
    match detail["type"]:
        case "extra_forbidden":
            if any(map(str.isdecimal, path)):
                return f"unknown key {key!r}. Arguments of callbacks and transforms are 'kwargs'."
            return f"unknown key {key!r}.{_nearest_key(path, keys)}"
        case "missing":
            return f"{key} is missing."
        case "value_error":
            return f"{key}: {detail['ctx']['error']}."
        case "model_type" | "model_attributes_type":
            return f"{key} must be a section of keys, not {detail['input']!r}."
    rules = [d["msg"].removeprefix("Input should be ") for d in details]
    return f"{key} must be {' or '.join(dict.fromkeys(rules))}, not {detail['input']!r}."


def _nearest_key(path: KeyPath, keys: Sequence[KeyPath]) -> str:
    """Suggests the key that is meant.

    It is the key that another trainer calls by this name; else a sibling of similar name; else the
    full path of a key of similar name in another section.
    """
    *above, name = path
    depth = len(above)
    siblings = {x[depth] for x in keys if len(x) > depth and is_at(x[:depth], tuple(above))}
    if (key := KEYS.get(name)) is not None:
        last = key.rpartition(".")[2]
        return f" Did you mean {last if last in siblings else key!r}?"
    elsewhere = KEYS | {key[-1]: ".".join(key) for key in reversed(keys)}
    return did_you_mean(name, siblings) or did_you_mean(name, elsewhere)
