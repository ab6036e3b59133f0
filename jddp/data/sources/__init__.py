"""Sources of data by name.

`fashion_mnist` is shipped with jddp, `python_stdlib` reads the library of the running interpreter,
and all others read your directory, in the format of their name. A source that reads a directory has
an argument `directory`; a source with several versions has an argument `source`.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

from jddp.data.source import DataSource
from jddp.data.sources.arrays import fashion_mnist, npy, npz
from jddp.data.sources.hugging_face import hugging_face, webdataset
from jddp.data.sources.images import image_folder
from jddp.data.sources.tokens import python_stdlib, tokens
from jddp.ground.errors import ConfigError
from jddp.ground.names import check_arguments, defaults_of, look_up
from jddp.ground.typing import Settings

SOURCES: dict[str, Callable[..., DataSource]] = {
    "fashion_mnist": fashion_mnist,
    "hugging_face": hugging_face,
    "image_folder": image_folder,
    "npy": npy,
    "npz": npz,
    "python_stdlib": python_stdlib,
    "tokens": tokens,
    "webdataset": webdataset,
}


def make_source(
    name: str, *, directory: str | None = None, kwargs: Settings | None = None
) -> DataSource:
    """The source with this name; it reads no example before `load()`.

    Args:
      name: A key of `SOURCES`.
      directory: Folder of the data, for sources that read one; `~` is the home directory.
      kwargs: Further arguments of the source.

    Raises:
      ConfigError: If there is no such source, or an argument breaks its rule.
    """
    make = look_up(name, SOURCES, key="data.name", kind="data set")
    defaults = defaults_of(make)
    kwargs = dict(kwargs or {})
    if "directory" in kwargs:
        raise ConfigError("data.kwargs: give 'directory' as data.dir.")
    if directory is not None and "directory" not in defaults:
        raise ConfigError(f"data.name={name} takes no data.dir. Leave out data.dir={directory}.")
    if defaults.get("directory") is inspect.Parameter.empty and directory is None:
        raise ConfigError(f"data.name={name} reads a directory. Give data.dir.")
    check_arguments(make, kwargs, key="data.kwargs", filled=["directory"])
    if directory is not None:
        kwargs["directory"] = Path(directory).expanduser().absolute()
    return make(**kwargs)
