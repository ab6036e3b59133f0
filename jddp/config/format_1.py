"""Names that `config.yaml` and `run.json` of a run directory had in format 1, and those of today.

Nothing else accepts the old names. Format 1 was written up to November 2026; this module is removed
once no such runs are left.
"""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "data.weights": "data.sample_weights",
    "ddp.num_shards": "ddp.logical_replicas",
    "ddp.placement": "ddp.overlap",
    "model.weights": "model.init_from",
    "train.compare_every_steps": "train.check_replicas_every_steps",
}
OVERLAP = {"ready": True, "end": False}  # by the word that `ddp.placement` had for it
SECTIONS = {"config": "", "plan": "train.", "world": "ddp."}  # of the config, in run.json


def renamed(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Returns nested values under the names of today.

    Args:
      values: The values, under names of any format.
      section: Path of the section in which they stand, with a dot at its end.
    """
    found = {}
    for name, value in values.items():
        key = f"{section}{name}"
        if key == "ddp.placement":
            value = OVERLAP.get(str(value), value)
        inner = renamed(value, f"{key}.") if isinstance(value, Mapping) else value
        found[RENAMED.get(key, key).removeprefix(section)] = inner
    return found


def renamed_run(beside: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was saved beside a state, in `run.json`, under the names of today."""
    now = {key: renamed(beside[key], at) for key, at in SECTIONS.items() if beside.get(key)}
    return {**beside, **now}
