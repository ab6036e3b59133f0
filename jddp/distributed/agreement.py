"""Checks that all processes of a job run the same program, before their first collective.

    agree("config", {"seed": "0", ...})       # ProcessMismatchError, on all, names process and key

Processes with different code, configs or data hang or compute nonsense, without an error.
"""

import json
from collections.abc import Mapping

from jddp.distributed.coordination import gather
from jddp.errors import ProcessMismatchError

SECONDS = 120.0  # for which the others may still be busy
_ABSENT = "nothing"


def agree(subject: str, values: Mapping[str, str]) -> None:
    """Compares the values of all processes with those of process 0.

    Args:
      subject: Common name of the values, for the error.
      values: The values of this process, by name.

    Raises:
      ProcessMismatchError: On every process, if any differs.
    """
    texts = gather(f"agree/{subject}", json.dumps(values), timeout_seconds=SECONDS)
    first, *_ = values_of_all = [json.loads(text) for text in texts]
    for process, other in enumerate(values_of_all):
        differ = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differ:
            name = differ[0]
            more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
            raise ProcessMismatchError(
                f"process {process} has another {subject} than process 0: {name} is "
                f"{other.get(name, _ABSENT)} there and {first.get(name, _ABSENT)} here{more}. "
                "Give every process the same."
            )
