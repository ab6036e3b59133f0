"""Notes on a resumed run: a different topology, different settings, a different schedule.

The effect of a key, in `config.schema`, decides whether it may differ at all.
"""

import math

from jddp.config.versions import DECODERS
from jddp.trainer.reports.run_directory import compare_keys, is_free
from jddp.typing import Settings
from jddp.zoo.optimizers import schedule_lengths

# Sources of images that are decoded when they are read.
DECODED = ("image_folder", "webdataset", "hugging_face")


def differences(
    before: Settings,
    now: Settings,
    *,
    uses_rng: bool,
    has_statistics: bool,
    has_order: bool = True,
) -> str | None:
    """A note on the difference of two topologies and its effect; None if they are equal.

    Args:
      before: Number of processes, of devices and of micro-batches, and the mode of batch norm, by
        name, when the run was saved.
      now: Topology of the run that resumes.
      uses_rng: Whether a step uses random numbers.
      has_statistics: Whether the model keeps batch statistics.
      has_order: Whether batches continue exactly in the order of the examples.
    """
    differ = [name for name in now if before.get(name) != now[name]]
    if not differ:
        return None
    numbers = ", ".join(f"{name} {now[name]} (was {before.get(name)})" for name in differ)
    kept = "the order of examples and all counts continue" if has_order else "all counts continue"
    exact = f"{numbers}: {kept} exactly"
    options = [name for name in differ if name not in ("num_processes", "num_devices")]
    if now["logical_replicas"] is not None and has_order and not options:
        return f"{exact}; all numbers stay bitwise identical"
    others = [name for name in options if not is_free(f"ddp.{name}", before, now)]
    inexact = [f"another {name} changes what later steps compute" for name in others]
    if uses_rng and differ != ["num_processes"]:
        inexact.append("random numbers differ (keys depend on replica and micro-batch)")
    is_whole = now["batch_norm"] == "sync" and now["batch_norm_group_size"] is None
    split_otherwise = "accumulate_steps" in differ or not is_whole
    if has_statistics and split_otherwise and differ != ["num_processes"]:
        inexact.append("batch norm computes statistics over other parts of a batch")
    if now.get("local_steps") and "num_devices" in differ:
        inexact.append("each replica starts from the mean of the saved replicas")
    return f"{exact}; {'; '.join(inexact) or 'all else is equal within rounding'}"


def changed_settings(before: Settings, now: Settings) -> str | None:
    """A note on the settings that have changed since the run was saved, or None.

    Args:
      before: Values that were saved beside the state, among them "config", or "plan" without one.
      now: The same values of the run that resumes.
    """
    if now["config"] is not None and before.get("config") is not None:
        differ = compare_keys(before["config"], now["config"])[1]
    else:
        old = before.get("plan", now["plan"])
        differ = [f"{k} {old[k]} -> {x}" for k, x in now["plan"].items() if old.get(k, x) != x]
    return f"changed: {', '.join(differ)}; finished steps stay" if differ else None


def changed_decoders(before: Settings, now: Settings) -> str | None:
    """A note that images may be decoded to other pixels than before, or None.

    Args:
      before: Values that were saved beside the state: "config" and "manifest".
      now: The same values of the run that resumes.
    """
    if (now["config"] or {}).get("data", {}).get("name") not in DECODED:
        return None
    old, new = (x.get("manifest", {}).get("versions", {}) for x in (before, now))
    differ = [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
        for name in DECODERS
        if old and old.get(name) != new.get(name)
    ]
    return f"another decoder may round pixels otherwise: {', '.join(differ)}" if differ else None


def changed_rate(
    step: int, before: float | None, now: float | None, keep: str | None = None
) -> str | None:
    """A note that the schedule differs from the one that finished steps followed, or None.

    Args:
      step: Number of finished steps.
      before: Learning rate with which the last of them was taken; None if it is not known.
      now: Learning rate of this step on the schedule with which the run resumes.
      keep: Key and value that would keep the earlier schedule, if they are known.
    """
    # Another platform may round a schedule differently.
    if before is None or now is None or math.isclose(before, now, rel_tol=1e-4, abs_tol=1e-12):
        return None
    way_back = "" if keep is None else f" To keep the old schedule: {keep}."
    return (
        f"learning rate: the schedule has changed, step {step} was taken at {before:.4g} and would "
        f"now be at {now:.4g}. Finished steps stay as they are.{way_back}"
    )


def length_before(config: Settings | None, plan: Settings) -> str | None:
    """The key and value that give a schedule its earlier length; None if it has no length.

    Args:
      config: Config of the run, as nested dicts; or settings of the user, or None.
      plan: Settings of the run that was saved.
    """
    if config is None:
        return None
    try:
        optimizer = config["optimizer"]
        schedule = optimizer["schedule"]
        lengths = schedule_lengths(
            schedule["name"], num_steps=plan["num_steps"], warmup_steps=optimizer["warmup_steps"]
        )
        own = schedule["kwargs"]
    except (LookupError, TypeError, AttributeError):  # settings of the user
        return None
    added = [f"optimizer.schedule.kwargs.{n}={x}" for n, x in lengths.items() if n not in own]
    return added[0] if added else None
