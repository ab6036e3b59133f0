"""The path of every key of a config, and their list for `--help-keys`.

`NAME` in a path stands for any name, of a section of which there may be several.
"""

from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]
Schema = type[BaseModel]
ANY = "NAME"
# Keys of earlier versions, each with its default and the effect that another value had. In a file
# the default is left out; another value is an unknown key.
REMOVED: dict[str, tuple[object, str]] = {
    "checkpoint.best_mode": ("auto", "numbers"),
    "checkpoint.keep_best": (1, "none"),
    "data.allow_changed": (False, "none"),
    "data.source": ("embedded", "numbers"),
    "ddp.strategy.outer.learning_rate": (1.0, "numbers"),
    "loss.eval_kwargs": ({}, "numbers"),
    "optimizer.decay_norms_and_biases": (False, "numbers"),
    "train.stop": (dict(metric=None, patience=3, mode="auto", min_delta=0.0), "result"),
    "watchdog.compile_seconds": (3600, "none"),
    "watchdog.evaluation_seconds": (3600, "none"),
    "watchdog.save_seconds": (3600, "none"),
    "watchdog.start_seconds": (1800, "none"),
}


def keys_of(schema: Schema, above: KeyPath = ()) -> dict[KeyPath, FieldInfo]:
    """Returns every plain key by its path, section by section."""
    keys: dict[KeyPath, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        path = (*above, name)
        kind = field.annotation
        if field.description is None and get_args(kind):  # sections by name
            path = (*path, ANY)
            kind = get_args(kind)[1]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys |= keys_of(kind, path)
        else:
            keys[path] = field
    return keys


def removed(key: str) -> str | None:
    """The entry of `REMOVED` that a dotted key is, or is inside of; None if there is none."""
    return next((name for name in REMOVED if f"{key}.".startswith(f"{name}.")), None)


def is_at(key: KeyPath, place: KeyPath) -> bool:
    """Whether a place in nested values is that of a key, or of a value inside of it."""
    return len(key) <= len(place) and all(x in (ANY, y) for x, y in zip(key, place, strict=False))


def describe_keys(schema: Schema) -> str:
    """Returns every key with its default and, on a line below, its meaning."""
    lines = []
    for path, field in keys_of(schema).items():
        default = field.get_default(call_default_factory=True)
        shown = "null" if default is None else str(default)
        lines += [f"{'.'.join(path)} = {shown}", f"    {field.description}"]
    return "\n".join(lines)
