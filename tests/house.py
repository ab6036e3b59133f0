"""The rooms of jddp, and the modules in them."""

from pathlib import Path

import jddp

PACKAGE = Path(jddp.__file__).parent
FRONT_DOOR = PACKAGE / "__init__.py"  # Names every room, and imports none until it is asked.
MODULES = sorted(set(PACKAGE.rglob("*.py")) - {FRONT_DOOR})


def room_of(path):
    is_door = path.name == "__main__.py"  # Also that of a package below.
    return "__main__" if is_door else path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path):
    parts = ("jddp", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
