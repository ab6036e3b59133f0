"""Walk the schema: the sections of a config, and the path of every key."""

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]
Schema = type[BaseModel]


def section_at(schema: Schema, path: Path) -> Schema | None:
    """Returns the section at `path`, or None if a plain key, or nothing, stands there."""
    for part in path:
        field = schema.model_fields.get(part)
        section = _section_of(field) if field else None
        if section is None:
            return None
        schema = section
    return schema


def keys_of(schema: Schema, above: Path = ()) -> dict[Path, FieldInfo]:
    """Returns every plain key by its path, section by section."""
    keys: dict[Path, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        section = _section_of(field)
        keys |= keys_of(section, (*above, name)) if section else {(*above, name): field}
    return keys


def describe_keys(schema: Schema) -> str:
    """Returns every key with its default and, on a line below, its meaning."""
    lines = []
    for path, field in keys_of(schema).items():
        default = field.get_default(call_default_factory=True)
        shown = "null" if default is None else str(default)
        lines += [f"{'.'.join(path)} = {shown}", f"    {field.description}"]
    return "\n".join(lines)


def _section_of(field: FieldInfo) -> Schema | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
