"""What a run does not repeat to the bit, once it goes on in another world than it was saved in."""

from collections.abc import Mapping
from typing import Any

World = Mapping[str, Any]


def differences(before: World, now: World, *, draws: bool, has_statistics: bool) -> str | None:
    """Says how two worlds differ and what that changes; None if they do not.

    Args:
      before: Number of processes, of devices and of parts, and the kind of batch norm, by name,
        when the run was saved.
      now: The same of the run that goes on.
      draws: Whether a step draws random numbers.
      has_statistics: Whether the model keeps batch statistics.
    """
    differ = [name for name in now if before.get(name) != now[name]]
    if not differ:
        return None
    numbers = ", ".join(f"{name} {now[name]} (was {before.get(name)})" for name in differ)
    goes_on = f"{numbers}: the order of examples and all counts go on exactly"
    if now["num_shards"] is not None and "accumulate_steps" not in differ:
        return f"{goes_on}, and all numbers, to the bit"
    inexact = []
    if draws and differ != ["num_processes"]:
        inexact.append("random numbers, which each replica and part draws for itself, are others")
    is_whole = now["batch_norm"] == "sync" and now["batch_norm_group_size"] is None
    split_otherwise = "accumulate_steps" in differ or not is_whole
    if has_statistics and split_otherwise and differ != ["num_processes"]:
        inexact.append("batch norm sees other parts of a batch")
    if now.get("local_steps") and "num_devices" in differ:
        inexact.append("each replica begins with the mean of those that were")
    changed = "; ".join(inexact) or "all else is the same up to rounding"
    return f"{goes_on}; {changed}"
