"""Refuses a job whose processes differ in something that must be the same in all.

agree("config or version", {"sha256": digest})    # before their first collective
"""

import json
from collections.abc import Mapping

from jddp.distributed.coordination import gather
from jddp.distributed.rendezvous import refuse_differences

_AGREE_SECONDS = 120.0  # the other processes may still be busy


def agree(subject: str, values: Mapping[str, str]) -> None:
    """Compares the values of all processes with those of process 0, before their first collective.

    Processes with different code, configs or data would hang, or compute nonsense without an error.

    Args:
      subject: Common name of the values, for the error.
      values: The values of this process, by name.

    Raises:
      ProcessMismatchError: On every process, if any differs.
    """
    texts = gather(f"agree/{subject}", json.dumps(values), timeout_seconds=_AGREE_SECONDS)
    of_all = ((str(process), json.loads(text)) for process, text in enumerate(texts))
    refuse_differences("process", subject, of_all)
