"""Data sets of Hugging Face: saved to disk, by their name on the Hub, as examples or as streams.

    hugging_face(directory=Path("mnist"))     # of DatasetDict.save_to_disk, or a folder per split
    hugging_face(path="ylecun/mnist")         # downloaded once, into the cache of `datasets`
    hugging_face(path="ylecun/mnist", streaming=True)       # read while it trains, not kept

Nothing but a name in the config downloads anything. The code of a data set is never run: `datasets`
refuses scripts, and pickles too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jddp.data.extras import import_extra
from jddp.data.shares import Share
from jddp.data.source import DataSource, Streams, source_of_parts, source_of_streams
from jddp.data.sources.decoded_rows import StoredRows, decoded_rows
from jddp.data.sources.hugging_face_splits import Splits, splits_at
from jddp.data.sources.row_streams import EndlessBatches, OnePass, ShuffledBatches, cut_rows
from jddp.errors import ConfigError, DataError


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
    streaming: bool = False,
    shuffle_buffer: int | None = None,
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
      streaming: Whether rows are read one after the other, in the order of the files.
      shuffle_buffer: Number of rows of a stream from which the next one is taken at random; None
        for their order.

    Raises:
      ConfigError: If there is not exactly one of directory and path, or an argument does not belong
        to streams, or to examples.
      DataError: If the data are absent or damaged, or the Hub cannot be reached.
    """
    _check(streaming, test_share, shuffle_buffer)
    splits = splits_at(directory, path, config, revision)
    parts = _Parts(splits, {"train": train_split, "test": test_split}, columns)
    name = f"hugging_face {directory or path}"
    if not streaming:
        return source_of_parts(name, parts.read, test_share)

    def open_streams(size: int, seed: int, share: Share) -> Streams:
        train = parts.train_batches(size, share, shuffle_buffer, seed)
        return Streams(train, parts.test_batches(size, share), f"{name}, a stream")

    return source_of_streams(name, open_streams)


def _check(streaming: bool, test_share: float | None, shuffle_buffer: int | None) -> None:
    """Refuses arguments that do not belong together."""
    if streaming and test_share is not None:
        raise ConfigError(
            f"data.kwargs.test_share={test_share} divides numbered examples, which a stream has "
            "not. Give train_split and test_split."
        )
    if shuffle_buffer is not None and not streaming:
        raise ConfigError(
            f"data.kwargs.shuffle_buffer={shuffle_buffer} is for data.kwargs.streaming=true. "
            "Without it data.shuffle shuffles all examples."
        )
    if shuffle_buffer is not None and shuffle_buffer < 1:
        raise ConfigError(
            f"data.kwargs.shuffle_buffer={shuffle_buffer} holds no row. Give 1 or more, or null."
        )


@dataclass(frozen=True)
class _Parts:
    """The parts "train" and "test" of a data set, with some columns."""

    splits: Splits
    names: Mapping[str, str]
    columns: Sequence[str] | None

    def read(self, part: str) -> StoredRows:
        """The examples of a part."""
        rows = self.splits.read(self.names[part])
        return decoded_rows(self._chosen(rows, part), self._where(part))

    def train_batches(
        self, size: int, share: Share, shuffle_buffer: int | None, seed: int
    ) -> EndlessBatches:
        """This process's batches of a stream, for training."""
        if size % share.num_processes:
            raise ConfigError(
                f"data.global_batch_size={size} does not divide over {share.num_processes} "
                "processes. Give a multiple."
            )
        rows, where = self._stream("train"), self._where("train")
        if shuffle_buffer is None:
            return EndlessBatches(*cut_rows(rows, where, size, share))
        # Without exact resumption no position is shared: each process reads rows of its own.
        distributed = import_extra("datasets.distributed", needed_by="a shuffled stream")
        shuffled = rows.shuffle(seed=seed, buffer_size=shuffle_buffer)
        own = distributed.split_dataset_by_node(shuffled, *share)
        rows_of_process, cut = cut_rows(own, where, size // share.num_processes, Share(0, 1))
        return ShuffledBatches(rows_of_process, cut, share.num_processes)

    def test_batches(self, size: int, share: Share) -> OnePass:
        """This process's batches of a stream, for testing."""
        return OnePass(*cut_rows(self._stream("test"), self._where("test"), size, share))

    def _stream(self, part: str) -> Any:
        return self._chosen(self.splits.stream(self.names[part]), part)

    def _chosen(self, rows: Any, part: str) -> Any:
        try:
            return rows.select_columns(list(self.columns)) if self.columns else rows
        except ValueError as error:  # which lists the columns there are
            reason = str(error).partition("\n")[0].rstrip(".")
            where = self._where(part)
            raise DataError(f"{where}: {reason}. See data.kwargs.columns.") from error

    def _where(self, part: str) -> str:
        return self.splits.where(self.names[part])
