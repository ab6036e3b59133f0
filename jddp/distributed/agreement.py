"""Do all processes of a job run the same thing? Asked before they meet in a collective.

    agree("config", {"seed": "0", ...})       # ProcessMismatchError, on all, names process and key

Processes that were given different code, configs or data hang, or compute nonsense, in silence.
"""

import json
from collections.abc import Mapping

from jddp.distributed.coordination import gather
from jddp.errors import ProcessMismatchError

SECONDS = 120.0  # for which the others may still be busy
_ABSENT = "nothing"


def agree(what: str, facts: Mapping[str, str]) -> None:
    """Compares facts with those of process 0.

    Args:
      what: What the facts are about, for the error.
      facts: By name.

    Raises:
      ProcessMismatchError: On every process, if any differs.
    """
    told = [
        json.loads(x) for x in gather(f"agree/{what}", json.dumps(facts), timeout_seconds=SECONDS)
    ]
    first = told[0]
    for process, other in enumerate(told):
        differ = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differ:
            name = differ[0]
            more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
            raise ProcessMismatchError(
                f"process {process} has another {what} than process 0: {name} is "
                f"{other.get(name, _ABSENT)} there and {first.get(name, _ABSENT)} here{more}. "
                "Give every process the same."
            )
