"""The rooms of jddp, and the modules in them."""

from pathlib import Path

import jddp

PACKAGE = Path(jddp.__file__).parent
FRONT_DOOR = PACKAGE / "__init__.py"  # Names every room, and imports none until it is asked.
MODULES = sorted(set(PACKAGE.rglob("*.py")) - {FRONT_DOOR})
# Modules of three lines, which are run, `python -m jddp.train`, and never imported.
DOORS = {PACKAGE / name for name in ("__main__.py", "train.py", "launch.py")}


def room_of(path):
    return "commands" if path in DOORS else path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path):
    parts = ("jddp", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
