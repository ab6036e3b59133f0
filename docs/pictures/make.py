"""Makes the pictures of the pages, which are committed beside this script.

    python docs/pictures/make.py            # here
    python docs/pictures/make.py FOLDER     # elsewhere, to compare

What is defined elsewhere is read there, and what can be computed is computed.
tests/project/test_docs.py holds the files to this script.
"""

import sys
from pathlib import Path

from a_run import checkpoint, elastic
from a_step import batch_norm, buckets, overlap, replica
from tables import architecture, results

MAKE = (replica, buckets, overlap, batch_norm, elastic, checkpoint, architecture, results)


def main(folder: Path = Path(__file__).parent) -> None:
    """Writes every picture into a folder."""
    for make in MAKE:
        (folder / f"{make.__name__}.svg").write_text(make())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
