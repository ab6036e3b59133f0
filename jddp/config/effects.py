"""Effects of the keys of a config: their defaults, and what another value does to a run's numbers.

effect_of("ddp.reduction.overlap")             # "rounding"
in_effect({"checkpoint.best_metric": "loss", "checkpoint.best_mode": "auto"})    # mode: "min"
"""

from typing import Any

from jddp.config.keys import keys_of
from jddp.config.schema import Config
from jddp.config.sections import Effect
from jddp.names.directions import direction_of
from jddp.typing import JsonObject, Settings


def default_of(key: str, otherwise: object) -> object:
    """Returns the default of a key, such as "ddp.ema_decay"; something else for an unknown key."""
    field = keys_of(Config).get(tuple(key.split(".")))
    return otherwise if field is None else field.get_default(call_default_factory=True)


def effect_of(key: str, *values: object) -> Effect:
    """Returns what another value of a key does to the numbers of a run.

    Args:
      key: The key, such as "ddp.reduction.overlap".
      *values: The two values; without them the effect is that of any two.
    """
    field = keys_of(Config).get(tuple(key.split(".")))
    about: Any = None if field is None else field.json_schema_extra
    if about is None:
        return "numbers"
    if values and all(value in about["alike"] for value in values):
        return "rounding"
    return about["effect"]


def in_effect(values: Settings) -> JsonObject:
    """Returns values by dotted keys, such that two that mean the same are equal.

    The mode of the best metric becomes "min" or "max" in the place of "auto", and None where no
    metric is named.
    """
    metric, mode = (values.get(f"checkpoint.best_{name}") for name in ("metric", "mode"))
    if isinstance(metric, str) and mode == "auto":
        mode = direction_of(metric)
    elif metric is None:
        mode = None
    return {
        **values,
        **({"checkpoint.best_mode": mode} if "checkpoint.best_mode" in values else {}),
    }
