"""Data sets of Hugging Face: saved to disk, or by their name on the Hub.

    hugging_face(directory=Path("mnist"))     # of DatasetDict.save_to_disk, or a folder per split
    hugging_face(path="ylecun/mnist")         # downloaded once, into the cache of `datasets`

Nothing but a name in the config downloads anything. The code of a data set is never run: `datasets`
refuses scripts, and pickles too.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jddp.data.source import DataSource, source_of_parts
from jddp.data.sources.datasets_library import caching, quiet_datasets
from jddp.data.sources.decoded_rows import DecodedRows
from jddp.data.sources.mapped import refusing_damage
from jddp.errors import ConfigError, DataError


@runtime_checkable
class _Place(Protocol):
    """Where a data set is."""

    def where(self, split: str) -> str:
        """Name of a split, for errors."""

    def read(self, split: str) -> Any:
        """The rows of a split, a `datasets.Dataset`."""


def hugging_face(
    *,
    directory: Path | None = None,
    path: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    columns: Sequence[str] | None = None,
    test_share: float | None = None,
) -> DataSource:
    """The source of a data set of Hugging Face.

    Args:
      directory: Folder that `DatasetDict.save_to_disk` has written, or one with a folder of
        `Dataset.save_to_disk` for each split.
      path: Name of a data set on the Hub, such as "ylecun/mnist", or a folder of files that
        `datasets.load_dataset` reads; in the place of a directory.
      config: Name of a configuration of the data set with this path.
      revision: Branch, tag or commit of the data set with this path.
      train_split: Name of the split for training.
      test_split: Name of the split for testing.
      columns: Columns to read; None for all.
      test_share: Fraction of the training split that is for testing in place of another split.

    Raises:
      ConfigError: If there is not exactly one of directory and path.
      DataError: If the data are absent or damaged, or the Hub cannot be reached.
    """
    place = _place(directory, path, config, revision)

    def read(part: str) -> DecodedRows:
        split = {"train": train_split, "test": test_split}[part]
        rows = place.read(split)
        chosen = rows.select_columns(list(columns)) if columns else rows
        return DecodedRows(chosen, place.where(split))

    return source_of_parts(f"hugging_face {directory or path}", read, test_share)


def _place(
    directory: Path | None, path: str | None, config: str | None, revision: str | None
) -> _Place:
    if (directory is None) == (path is None):
        raise ConfigError(
            "data.name=hugging_face reads a folder, data.dir, or a data set of the Hub by name, "
            "data.kwargs.path. Give one of the two."
        )
    if path is not None:
        return _Named(path, config, revision)
    for name, value in (("config", config), ("revision", revision)):
        if value is not None:
            raise ConfigError(
                f"data.kwargs.{name}={value} belongs to data.kwargs.path. Leave it out: the folder "
                "data.dir holds what was saved."
            )
    assert directory is not None
    return _Saved(directory)


@dataclass(frozen=True)
class _Saved:
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


@dataclass(frozen=True)
class _Named:
    """Splits of a data set that `datasets` finds by its name."""

    path: str
    config: str | None
    revision: str | None

    def where(self, split: str) -> str:
        return f"{self.path}, split {split}"

    def read(self, split: str) -> Any:
        with quiet_datasets() as datasets, self._finding(self.where(split)):
            return datasets.load_dataset(
                self.path, self.config, split=split, revision=self.revision
            )

    @contextlib.contextmanager
    def _finding(self, where: str) -> Iterator[None]:
        """While open, an error names the split and the way to get it."""
        with refusing_damage(where, "data set of datasets"), caching(where), self._reaching(where):
            yield

    @contextlib.contextmanager
    def _reaching(self, where: str) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise DataError(
                f"{where}: {_line(error)}. Load it once where there is a network, with the same "
                f"HF_HOME: python -c \"import datasets; datasets.load_dataset('{self.path}')\"; or "
                "give a folder of DatasetDict.save_to_disk as data.dir."
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
