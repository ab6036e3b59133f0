"""The path of every key of a config, and their list for `--help-keys`."""

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]
Schema = type[BaseModel]


def keys_of(schema: Schema, above: Path = ()) -> dict[Path, FieldInfo]:
    """Returns every plain key by its path, section by section."""
    keys: dict[Path, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        path, kind = (*above, name), field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys |= keys_of(kind, path)
        else:
            keys[path] = field
    return keys


def describe_keys(schema: Schema) -> str:
    """Returns every key with its default and, on a line below, its meaning."""
    lines = []
    for path, field in keys_of(schema).items():
        default = field.get_default(call_default_factory=True)
        shown = "null" if default is None else str(default)
        lines += [f"{'.'.join(path)} = {shown}", f"    {field.description}"]
    return "\n".join(lines)
