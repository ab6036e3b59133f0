"""The sources of data by name.

`fashion_mnist` is shipped with jddp, `python_stdlib` reads the running interpreter's own library,
all others read a directory of the user's own, in a format that the name says.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jddp.data.source import Source
from jddp.data.sources.arrays_on_disk import idx, npy, npz
from jddp.data.sources.fashion_mnist import fashion_mnist
from jddp.data.sources.image_folder import image_folder
from jddp.data.sources.records import array_record, hugging_face, parquet
from jddp.data.sources.stdlib_text import python_stdlib
from jddp.data.sources.tokens import tokens
from jddp.errors import ConfigError
from jddp.zoo.names import check_arguments, did_you_mean

SOURCES: dict[str, Callable[..., Source]] = {
    "array_record": array_record,
    "fashion_mnist": fashion_mnist,
    "hugging_face": hugging_face,
    "idx": idx,
    "image_folder": image_folder,
    "npy": npy,
    "npz": npz,
    "parquet": parquet,
    "python_stdlib": python_stdlib,
    "tokens": tokens,
}


def make_source(
    name: str,
    *,
    source: str = "embedded",
    directory: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Source:
    """The source of that name; it reads nothing before `load()`.

    Args:
      name: A key of `SOURCES`.
      source: "embedded", or "full" where the data has a larger part that is not shipped.
      directory: Where to read from, where that is needed; `~` is the home directory.
      kwargs: Further arguments of the source.

    Raises:
      ConfigError: If there is no such source, or an argument breaks its rule.
    """
    if name not in SOURCES:
        known = ", ".join(sorted(SOURCES))
        raise ConfigError(
            f"data.name: no data set {name!r}.{did_you_mean(name, list(SOURCES))} Known: {known}."
        )
    kwargs = dict(kwargs or {})
    if misplaced := {"source", "directory"} & kwargs.keys():
        raise ConfigError(f"data.kwargs: {misplaced.pop()!r} belongs into data.source or data.dir.")
    check_arguments(SOURCES[name], kwargs, key="data.kwargs", filled=("source", "directory"))
    home = directory and str(Path(directory).expanduser())
    return SOURCES[name](source=source, directory=home, **kwargs)
