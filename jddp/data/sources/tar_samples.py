"""Where the samples of tar files are, so that they can be read in any order.

    samples = find_samples([Path("train-000.tar")], [{"jpg", "png"}, {"cls"}])
    samples.read(1200, 0)                         # the content of 1200.jpg

A sample is the members of one tar file whose names are equal up to the first dot after the last
slash; the rest of a name is its ending: cat/12.jpg and cat/12.cls are the sample cat/12.

The headers of a file are read once, by the standard library: the library of the format, webdataset,
reads tar files as streams, in the order in which they were written. The places of members are kept
in memory, about 110 bytes for a sample of two, and are sent to workers, which read no header again.

References:
  The WebDataset format. https://github.com/webdataset/webdataset#the-webdataset-format
"""

import io
import logging
import os
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jddp.data.sources.mapped import refusing_damage, require_file
from jddp.errors import DataError, printable

MOST_OPEN = 256  # files at a time: a process may often have no more than 1,024

FIRST_DOT = "A name ends at its first dot."

_NO_MEMBER = (-1, 0)

_Place = tuple[int, int]  # the first byte of a content in its file, and the number of its bytes


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of tar files, each with the same members.

    Attributes:
      files: The tar files.
      names: Names of the samples.
      shards: Number of the tar file of each.
      places: Place of each member, `(samples, members, 2)`.
    """

    files: "TarFiles"
    names: Sequence[str]
    shards: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def where(self, is_wanted: np.ndarray) -> "Samples":
        """Some of the samples, in their order."""
        names = [self.names[row] for row in np.flatnonzero(is_wanted).tolist()]
        return Samples(self.files, names, self.shards[is_wanted], self.places[is_wanted])

    def called(self, index: int) -> str:
        """The tar file and the name of a sample, for errors and logs."""
        path = self.files.paths[int(self.shards[index])]
        return printable(f"{path.name}: {self.names[index]}")

    def read(self, index: int, member: int) -> bytes:
        """The content of a member of a sample.

        Raises:
          DataError: If its file is shorter than it was.
        """
        offset, size = self.places[index, member].tolist()
        return self.files.read(int(self.shards[index]), offset, size)

    def fingerprint(self) -> str:
        """A hash of the names and sizes of all members."""
        digest = sha256("\n".join(self.names).encode(errors="surrogateescape"))
        digest.update(self.places[:, :, 1].tobytes())
        return digest.hexdigest()


class TarFiles:
    """Files that stay open between reads; a worker to which they are sent opens them itself."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._opened = lru_cache(MOST_OPEN)(_OpenFile)

    def __reduce__(self) -> tuple[object, ...]:
        return TarFiles, (self.paths,)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Some bytes of a file.

        Raises:
          DataError: If it has fewer.
        """
        path = self.paths[number]
        with refusing_damage(path, "tar file"):
            found = os.pread(self._opened(path).fileno(), size, offset)
        if len(found) < size:
            raise _cut_off(path, offset + len(found))
        return found


class _OpenFile(io.FileIO):
    """A file that is closed with its last reference, which another thread may still have."""

    def __del__(self) -> None:
        self.close()


class _Member(NamedTuple):
    """A member of a tar file."""

    sample: str
    ending: str
    place: _Place


def find_samples(paths: Sequence[Path], endings: Sequence[Collection[str]]) -> Samples:
    """The samples of tar files, in the order of the files and of their first members.

    Args:
      paths: The tar files.
      endings: Endings that each member of a sample may have.

    Raises:
      DataError: If a file is cut off or damaged, there is no sample, or one lacks a member, or
        has it twice.
    """
    shards = [_scan(path, endings) for path in paths]
    places = [place for shard in shards for place in shard.values()]
    if not places:
        known = _one_of({*chain(*endings)})
        found = sorted({member.ending for member in islice(_members(paths[0]), 100)}) or ["none"]
        raise DataError(
            f"{paths[0]}: no sample with a member {known}, but {printable(', '.join(found[:4]))}. "
            f"{FIRST_DOT} Add or rename some, or choose others: data.kwargs.members."
        )
    return Samples(
        TarFiles(paths),
        [name for shard in shards for name in shard],
        np.repeat(np.arange(len(shards), dtype=np.int32), [len(shard) for shard in shards]),
        np.array(places, np.int64).reshape(len(places), len(endings), 2),
    )


def _scan(path: Path, endings: Sequence[Collection[str]]) -> dict[str, list[_Place]]:
    """The places of the members of each sample in a file."""
    samples: dict[str, list[_Place]] = {}
    for sample, ending, place in _members(path):
        places = samples.setdefault(sample, [_NO_MEMBER] * len(endings))
        for number, group in enumerate(endings):
            if ending not in group:
                continue
            if places[number] != _NO_MEMBER:
                raise DataError(
                    f"{path}: sample {printable(sample)} has two members {_one_of(group)}. Remove "
                    "one; or choose an ending: data.kwargs.members."
                )
            places[number] = place
    return _whole(path, samples, endings)


def _whole(
    path: Path, samples: dict[str, list[_Place]], endings: Sequence[Collection[str]]
) -> dict[str, list[_Place]]:
    """The samples that have all members; those that have none are left out."""
    found = {name: x for name, x in samples.items() if any(place != _NO_MEMBER for place in x)}
    if num_others := len(samples) - len(found):
        logging.getLogger("jddp").warning(
            "%s: %d samples, such as %s, have none of the members that are read, and are left out.",
            path,
            num_others,
            printable(next(name for name in samples if name not in found)),
        )
    for name, places in found.items():
        if _NO_MEMBER in places:
            missing = endings[places.index(_NO_MEMBER)]
            raise DataError(
                f"{path}: sample {printable(name)} has no member {_one_of(missing)}. {FIRST_DOT} "
                "Add it, or choose the members of all samples: data.kwargs.members."
            )
    return found


def _one_of(endings: Collection[str]) -> str:
    return " or ".join(sorted(endings))


def _members(path: Path) -> Iterator[_Member]:
    """The files in a tar file that have an ending."""
    require_file(path)
    with (
        refusing_damage(path, "tar file"),
        path.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        while (header := _next(tar)) is not None:
            if header.size < 0:  # tarfile would go back, and never end
                where = f"{path}: damaged: a member of {header.size:,} bytes at {header.offset:,}"
                raise DataError(f"{where}. Write it again.")
            sample, ending = _split(header.name)
            if sample and header.isreg() and not header.issparse():
                yield _Member(sample, ending, (header.offset_data, header.size))
            vars(tar)["members"] = []  # which would keep a kilobyte of each
        _refuse_end(path, file, tar.offset)


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next header; None at the end, and where the file is cut off or damaged."""
    try:
        return tar.next()
    except tarfile.ReadError:
        return None


def _split(name: str) -> tuple[str, str]:
    """The name of a sample, and the ending of its member; both are empty if there is none."""
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    return (name[:dot], name[dot + 1 :].lower()) if dot > begin else ("", "")


def _refuse_end(path: Path, file: io.BufferedReader, offset: int) -> None:
    """Refuses a file whose headers end in anything but a block of zeros."""
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise _cut_off(path, file.seek(0, os.SEEK_END))
    if any(block):
        raise DataError(f"{path}: damaged: no header of tar at byte {offset:,}. Write it again.")
    if any(file.read(tarfile.RECORDSIZE)):
        raise DataError(
            f"{path}: ends at byte {offset:,}, but more follows. Join tar files by tar "
            "--concatenate, not cat."
        )


def _cut_off(path: Path, size: int) -> DataError:
    return DataError(f"{path}: cut off at byte {size:,}: a tar file ends in zeros. Write it again.")
