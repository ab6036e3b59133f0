"""The share of the rows that a process reads: its number, and the number of processes.

    Share.of(None, None)      # this process's share if JAX has joined a job; else all rows
    Share.of(1, 4)            # as given

This starts no device: JAX knows the number of this process as soon as it has joined its job.
"""

import sys
from typing import NamedTuple

from jddp.errors import ConfigError


class Share(NamedTuple):
    """One of several equal parts of the rows.

    Attributes:
      process_index: Number of the process.
      num_processes: Number of processes.
    """

    process_index: int
    num_processes: int

    def __str__(self) -> str:
        """Text for a sentence."""
        return f"share {self.process_index} of {self.num_processes}"

    def part_of(self, num_rows: int) -> tuple[int, int]:
        """The first of this share's rows of a batch, and the first that is not its."""
        index, count = self
        return index * num_rows // count, (index + 1) * num_rows // count

    @classmethod
    def of(cls, process_index: int | None, num_processes: int | None) -> "Share":
        """The share with these numbers; None stands for the numbers of this process in its job.

        Raises:
          ConfigError: If there is no such process.
        """
        here = _here()
        index = here.process_index if process_index is None else process_index
        count = here.num_processes if num_processes is None else num_processes
        if not 0 <= index < count:
            raise ConfigError(
                f"process_index={index} must be from 0 up, and below num_processes={count}. "
                "Without both they are JAX's, once it has joined a job."
            )
        return cls(int(index), int(count))


def _here() -> Share:
    if "jax" not in sys.modules:
        return Share(0, 1)
    from jddp.distributed import coordination  # which imports JAX

    return Share(coordination.process_index(), coordination.num_processes())
