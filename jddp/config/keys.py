"""The path of every key of a config, and their list for `--help-keys`.

`NAME` in a path stands for any name, of a section of which there may be several.
"""

from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]
Schema = type[BaseModel]
ANY = "NAME"


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
