"""Reads from JAX's message before an abort which process it has lost.

Its coordination service ends a process that has had no heartbeat of another for too long.
"""

import re

_SILENT = re.compile(r"unhealthy \(stopped sending heartbeats\):\s+(\d+(?:\s+\d+)*)")
_COORDINATOR = re.compile(r"RPC: /\S*CoordinationService/(?:Heartbeat|PollForError)")


def lost_processes(output: str) -> str | None:
    """Names the processes that JAX reports as lost; None if it reports none."""
    silent = _SILENT.search(output)
    if silent is not None:
        numbers = sorted(silent[1].split(), key=int)
        return f"process{'es' * (len(numbers) > 1)} {', '.join(numbers)}"
    return "process 0" if _COORDINATOR.search(output) else None
