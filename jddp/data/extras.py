"""Imports libraries that only some data needs: those of the extra jddp[data]."""

import importlib
from typing import Any

from jddp.errors import ConfigError


def import_extra(name: str, *, needed_by: str) -> Any:
    """The library with this name.

    Raises:
      ConfigError: If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs {name}, which is not installed: pip install 'jddp[data]'."
        ) from error
