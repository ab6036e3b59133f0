"""What JAX says before it aborts a process, in fewer words.

Its coordination service ends whoever has not heard from another for the time of a heartbeat.
"""

import re

_SILENT = re.compile(r"unhealthy \(stopped sending heartbeats\):\s+(\d+(?:\s+\d+)*)")
_COORDINATOR = re.compile(r"RPC: /\S*CoordinationService/(?:Heartbeat|PollForError)")


def whom_jax_has_lost(words: str) -> str | None:
    """Which processes another has not heard from any more; None if JAX has not said so."""
    silent = _SILENT.search(words)
    if silent is not None:
        numbers = sorted(silent[1].split(), key=int)
        return f"process{'es' * (len(numbers) > 1)} {', '.join(numbers)}"
    return "process 0" if _COORDINATOR.search(words) else None
