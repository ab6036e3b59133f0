"""Rows of files that another library reads, but jddp decodes.

The columns of a Parquet file name their type. Hugging Face's `datasets` would decode images in any
format of Pillow, some of which start programs, and would download images that are only addresses.
Here images are decoded from their bytes, in the formats of image folders; sound, video and similar
types are refused. The exceptions of a library for damaged bytes become a `DataError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from jddp.data.extras import import_extra
from jddp.data.sources.images import decode_image
from jddp.data.sources.mapped import refusing_damage
from jddp.errors import DataError

Row = dict[str, Any]  # by the names of columns


class StoredRows:
    """Rows that a library reads from files, and a function then decodes.

    Args:
      rows: Object with `__len__` and `__getitem__`; `__getitems__`, if any, reads many at once.
      where: Name of the files, for errors.
      decode: Function from one of them to a row; what it raises is its own.
    """

    def __init__(self, rows: Any, where: str, decode: Callable[[Any], Row]) -> None:
        self._rows = rows
        self._where = where
        self._decode = decode

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> Row:
        return self.__getitems__([int(index)])[0]

    def column(self, name: str) -> np.ndarray | None:
        """A column of all rows, if they are stored by columns."""
        if name not in getattr(self._rows, "column_names", ()):
            return None
        return np.asarray(self._rows.select_columns([name])[:][name])

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """The rows at these indices, which are read together.

        Raises:
          DataError: If one cannot be read.
        """
        with refusing_damage(self._where, "file of rows"):
            if hasattr(self._rows, "__getitems__"):
                stored = list(self._rows.__getitems__(list(indices)))
            else:
                stored = [self._rows[index] for index in indices]
        return [self._decode(row) for row in stored]


@dataclass(frozen=True)
class Images:
    """The columns of rows that hold images.

    Attributes:
      where: Name of the rows, for errors.
      modes: Mode of Pillow of each of these columns, by its name; None for grey or colour.
    """

    where: str
    modes: Mapping[str, str | None]

    def decoded(self, row: Row) -> Row:
        """The row with images as arrays of uint8, `(height, width)` or `(height, width, 3)`.

        Raises:
          DataError: If one cannot be decoded.
        """
        images = {name: self._decode(name, row[name], mode) for name, mode in self.modes.items()}
        return row | images

    def _decode(self, name: str, stored: Any, mode: str | None) -> np.ndarray:
        where = f"{self.where}: an image of column {name!r}"
        if stored is None or stored["bytes"] is None:
            raise DataError(f"{where} is only a path, which is not read. Embed its bytes.")
        return decode_image(stored["bytes"], mode=mode, where=where)


def decoded_rows(rows: Any, where: str) -> StoredRows:
    """Rows of a data set of Hugging Face, whose images are decoded here.

    Raises:
      DataError: If a column holds another type that would be decoded.
    """
    stored, images = stored_rows(rows, where)
    return StoredRows(stored, where, images.decoded)


def stored_rows(rows: Any, where: str) -> tuple[Any, Images]:
    """Rows of Hugging Face as arrays, with images as they are stored; and the columns of images.

    Args:
      rows: A `Dataset` or an `IterableDataset`.
      where: Name of the rows, for errors.

    Raises:
      DataError: If a column holds another type that would be decoded.
    """
    datasets = import_extra("datasets", needed_by="this data set")
    modes: dict[str, str | None] = {}
    for name, feature in (rows.features or {}).items():  # of a stream they may be unknown
        if isinstance(feature, datasets.Image):
            import_extra("PIL", needed_by=f"column {name!r}")
            modes[name] = feature.mode
            rows = rows.cast_column(name, datasets.Image(mode=feature.mode, decode=False))
        elif datasets.features.features.require_decoding(feature):
            raise DataError(
                f"{where}: column {name!r} is {type(feature).__name__}, which is not decoded. "
                "Leave it out: data.kwargs.columns."
            )
    return rows.with_format("numpy"), Images(where, modes)
