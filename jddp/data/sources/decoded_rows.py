"""Rows of files that another library reads, but jddp decodes.

The columns of a Parquet file name their type. Hugging Face's `datasets` would decode images in any
format of Pillow, some of which start programs, and would download images that are only addresses.
Here images are decoded from their bytes, in the formats of image folders; sound, video and similar
types are refused. The exceptions of a library for damaged bytes become a `DataError`.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from jddp.data.extras import import_extra
from jddp.data.sources.images import FORMATS, refusing_undecodable
from jddp.data.sources.mapped import refusing_damage
from jddp.errors import DataError

Row = dict[str, Any]  # by the names of columns


class StoredRows:
    """Rows as a library reads them from files.

    Args:
      rows: Object with `__len__` and `__getitem__`; `__getitems__`, if any, reads many at once.
      where: Name of the files, for errors.
    """

    def __init__(self, rows: Any, where: str) -> None:
        self._rows = rows
        self._where = where

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> Row:
        return self.__getitems__([int(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """The rows at these indices.

        Raises:
          DataError: If one cannot be read.
        """
        with refusing_damage(self._where, "file of rows"):
            if hasattr(self._rows, "__getitems__"):
                return list(self._rows.__getitems__(list(indices)))
            return [self._rows[index] for index in indices]


class MappedRows:
    """Rows that a function makes of what is stored.

    Args:
      stored: The stored rows.
      function: Function from one of them to a row; what it raises is its own.
    """

    def __init__(self, stored: StoredRows, function: Callable[[Any], Row]) -> None:
        self._stored = stored
        self._function = function

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: SupportsIndex) -> Row:
        return self._function(self._stored[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """The rows at these indices, which are read together."""
        return [self._function(stored) for stored in self._stored.__getitems__(indices)]


class DecodedRows(StoredRows):
    """Rows of a data set of Hugging Face, whose images are decoded here.

    Raises:
      DataError: If a column holds another type that would be decoded.
    """

    def __init__(self, rows: Any, where: str) -> None:
        stored, self._images = stored_rows(rows, where)
        super().__init__(stored, where)

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """The rows at these indices, with images as arrays `(height, width, ...)` of uint8.

        Raises:
          DataError: If one cannot be read.
        """
        return [self._images.decoded(row) for row in super().__getitems__(indices)]


@dataclass(frozen=True)
class Images:
    """The columns of rows that hold images.

    Attributes:
      where: Name of the rows, for errors.
      modes: Mode of Pillow of each of these columns, by its name; None for that of the image.
    """

    where: str
    modes: Mapping[str, str | None]

    def decoded(self, row: Row) -> Row:
        """The row with images as arrays `(height, width, ...)` of uint8.

        Raises:
          DataError: If one cannot be decoded.
        """
        images = {name: self._decode(name, row[name], mode) for name, mode in self.modes.items()}
        return row | images

    def _decode(self, name: str, stored: Any, mode: str | None) -> np.ndarray:
        from PIL import Image, ImageOps

        where = f"{self.where}: an image of column {name!r}"
        if stored is None or stored["bytes"] is None:
            raise DataError(f"{where} is only a path, which is not read. Embed its bytes.")
        encoded = io.BytesIO(stored["bytes"])
        with refusing_undecodable(where), Image.open(encoded, formats=FORMATS) as file:
            image = ImageOps.exif_transpose(file)
            return np.asarray(image.convert(mode) if mode else image)


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
