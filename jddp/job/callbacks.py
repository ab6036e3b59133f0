"""The callbacks of a job: its config lists them, or has a key for one."""

import functools
from collections.abc import Callable

from jddp.config.schema import CallbackConfig, Config
from jddp.errors import ConfigError
from jddp.names import check_arguments, named
from jddp.names.plugins import ADDED_CALLBACKS, added
from jddp.trainer.callbacks import Callback
from jddp.trainer.watching import EarlyStopping, KeepBest

CALLBACKS: dict[str, Callable[..., Callback]] = {
    "early_stopping": EarlyStopping,
    "keep_best": KeepBest,
}
Make = Callable[[], Callback]


def find_callbacks(config: Config) -> list[Make]:
    """Functions that make the callbacks that a config lists, with checked arguments.

    Raises:
      ConfigError: If a name or a target is unknown, or an argument is.
    """
    return [_find(f"callbacks[{i}]", section) for i, section in enumerate(config.callbacks)]


def _find(key: str, section: CallbackConfig) -> Make:
    make = named(section, key, CALLBACKS | dict(added(ADDED_CALLBACKS)), "callback")
    check_arguments(make, section.kwargs, key=f"{key}.kwargs")
    return functools.partial(_made, key, make, section)


def _made(key: str, make: Callable[..., object], section: CallbackConfig) -> Callback:
    made = make(**section.kwargs)
    if not isinstance(made, Callback):
        raise ConfigError(
            f"{key}.target: {section.target} returns {type(made).__name__}. It must return a "
            "jddp.Callback."
        )
    return made


def make_callbacks(config: Config) -> list[Callback]:
    """The callbacks of a run, new ones.

    Raises:
      ConfigError: As `find_callbacks`, or if an argument breaks a rule of the callback.
    """
    metric = config.checkpoint.best_metric
    made = [] if metric is None else [KeepBest(metric)]
    return [*made, *(make() for make in find_callbacks(config))]
