"""Imports libraries of the extra jddp[data], which only some data need."""

import importlib
from types import ModuleType

from jddp.errors import ConfigError


def import_extra(name: str, *, needed_by: str) -> ModuleType:
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
