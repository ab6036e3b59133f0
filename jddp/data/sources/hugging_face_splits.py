"""The splits of a data set of Hugging Face: in folders, or found by the name of the data set."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jddp.data.sources.datasets_library import caching, quiet_datasets
from jddp.data.sources.mapped import refusing_damage
from jddp.errors import ConfigError, DataError


@runtime_checkable
class Splits(Protocol):
    """Splits of a data set, by their names."""

    def where(self, split: str) -> str:
        """Name of a split, for errors."""

    def read(self, split: str) -> Any:
        """The rows of a split, a `datasets.Dataset`."""

    def stream(self, split: str) -> Any:
        """The rows of a split, a `datasets.IterableDataset`."""


def splits_at(
    directory: Path | None, path: str | None, config: str | None, revision: str | None
) -> Splits:
    """The splits in a folder, or of a data set with this path.

    Raises:
      ConfigError: If there is not exactly one of the two, or the folder has more arguments.
    """
    if (directory is None) == (path is None):
        raise ConfigError(
            "data.name=hugging_face reads a folder, data.dir, or a data set of the Hub by name, "
            "data.kwargs.path. Give one of the two."
        )
    if path is not None:
        return _NamedSplits(path, config, revision)
    for name, value in (("config", config), ("revision", revision)):
        if value is not None:
            raise ConfigError(
                f"data.kwargs.{name}={value} belongs to data.kwargs.path. Leave it out: the folder "
                "data.dir holds what was saved."
            )
    assert directory is not None
    return _SavedSplits(directory)


@dataclass(frozen=True)
class _SavedSplits:
    """Splits in folders of this name."""

    directory: Path

    def where(self, split: str) -> str:
        return str(self.directory / split)

    def read(self, split: str) -> Any:
        where = self.where(split)
        if not (self.directory / split).is_dir():
            there = sorted(x.parent.name for x in self.directory.glob("*/state.json"))
            splits = f"The splits there are: {', '.join(there)}. " if there else ""
            raise DataError(f"{where}: no such folder. {splits}It is needed; see data.dir.")
        with quiet_datasets() as datasets, refusing_damage(where, "data set of datasets"):
            rows = datasets.load_from_disk(where)
            # Arrow aborts at places outside of their array. This check reads no numbers.
            rows.data.validate(full=True)
            return rows

    def stream(self, split: str) -> Any:
        return self.read(split).to_iterable_dataset()


@dataclass(frozen=True)
class _NamedSplits:
    """Splits of a data set that `datasets` finds by its name."""

    path: str
    config: str | None
    revision: str | None

    def where(self, split: str) -> str:
        return f"{self.path}, split {split}"

    def read(self, split: str) -> Any:
        return self._load(split, streaming=False)

    def stream(self, split: str) -> Any:
        return self._load(split, streaming=True)

    def _load(self, split: str, *, streaming: bool) -> Any:
        options = {"split": split, "revision": self.revision, "streaming": streaming}
        where = self.where(split)
        refusing = refusing_damage(where, "data set of datasets")
        with quiet_datasets() as datasets, refusing, caching(where), self._reaching(where):
            return datasets.load_dataset(self.path, self.config, **options)

    @property
    def _arguments(self) -> str:
        """The data set as arguments of `load_dataset`."""
        revision = [] if self.revision is None else [f"revision={self.revision!r}"]
        names = [self.path] if self.config is None else [self.path, self.config]
        return ", ".join([*map(repr, names), *revision])

    @contextlib.contextmanager
    def _reaching(self, where: str) -> Iterator[None]:
        """While open, an error names the split and the way to get it."""
        try:
            yield
        except ConnectionError as error:
            raise DataError(
                f"{where}: {_line(error)}. Load it once where there is a network, with the same "
                f'HF_HOME: python -c "import datasets; datasets.load_dataset({self._arguments})"; '
                "or give a folder of DatasetDict.save_to_disk as data.dir."
            ) from error
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # about a file of the cache
            raise DataError(
                f"{where}: {_line(error)}. See data.kwargs: path, config, revision, train_split, "
                "test_split."
            ) from error


def _line(error: Exception) -> str:
    """The first sentence of an error."""
    return str(error).partition("\n")[0].rstrip(".")
