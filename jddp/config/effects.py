"""Effects of the keys of a config: their defaults, and what another value does to a run's numbers.

effect_of("ddp.reduction.overlap")             # "rounding"
"""

from typing import Any

from jddp.config.keys import REMOVED, keys_of, removed
from jddp.config.schema import Config


def default_of(key: str, otherwise: object) -> object:
    """Returns the default of a key, such as "ddp.ema_decay"; something else for an unknown key."""
    field = keys_of(Config).get(tuple(key.split(".")))
    return otherwise if field is None else field.get_default(call_default_factory=True)


def effect_of(key: str, *values: object) -> str:
    """Returns what another value of a key does to the numbers of a run.

    Args:
      key: The key, such as "ddp.reduction.overlap".
      *values: The two values; without them the effect is that of any two.
    """
    field = keys_of(Config).get(tuple(key.split(".")))
    about: Any = None if field is None else field.json_schema_extra
    if about is None:
        name = removed(key)
        return "numbers" if name is None else REMOVED[name][1]
    if values and all(value in about["alike"] for value in values):
        return "rounding"
    return about["effect"]
