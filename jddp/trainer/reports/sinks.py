"""Chooses sinks: a word for one of jddp's, `package.module:Name` or an object for your own.

    choose_sinks(["tensorboard", "my_sinks:Lines"], key="report.sinks")

A package that only a sink needs is looked for here, before training, and imported in its thread.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from jddp.errors import ConfigError
from jddp.names import did_you_mean, name_of_callable, resolve_target
from jddp.trainer.reports.sink import Sink, Start

# A word, a target, a sink, or a class or function that makes one.
GivenSink = str | Sink | Callable[[Start], Sink]


class ChosenSink(NamedTuple):
    """A sink that a run will make.

    Attributes:
      name: Word or target that names it, or the name of its class.
      make: Function that makes it.
      needs_run_dir: Whether it writes into the run directory.
    """

    name: str
    make: Callable[[Start], Sink]
    needs_run_dir: bool = False

    def refuse_no_run_dir(self) -> None:
        """Refuses a run without a run directory, if the sink writes there.

        Raises:
          ConfigError: If it does.
        """
        if self.needs_run_dir:
            raise ConfigError(f"The sink {self.name} needs run_dir= (run.dir), where it writes.")


def _tensorboard(start: Start) -> Sink:
    from jddp.trainer.reports.tensorboard import TensorBoard

    return TensorBoard(start)


def _wandb(start: Start) -> Sink:
    from jddp.trainer.reports.wandb import WeightsAndBiases

    return WeightsAndBiases(start)


METHODS = ("log", "close")
# By word: the package that it needs, and the function that makes it.
WORDS = {"tensorboard": ("tensorboardX", _tensorboard), "wandb": ("wandb", _wandb)}


def choose_sinks(given: object, *, key: str) -> list[ChosenSink]:
    """Returns the sinks that are named or given; imports the modules of targets.

    Args:
      given: A list of words, targets, sinks, and classes or functions that make one.
      key: The config key or argument that holds them, for errors.

    Raises:
      ConfigError: If a name is unknown, a package is not installed, or an object is no sink.
    """
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{key} is a list of sinks, such as ['tensorboard']; got {given!r}.")
    return [_choose(sink, f"{key}[{number}]") for number, sink in enumerate(given)]


def _choose(given: object, key: str) -> ChosenSink:
    if not isinstance(given, str):
        return _of_object(name_of_callable(given), given, key)
    if ":" in given:
        return _of_object(given, resolve_target(given, key=key), key)
    return _of_word(given, key)


def _of_word(word: str, key: str) -> ChosenSink:
    if word not in WORDS:
        known = f"Known: {', '.join(WORDS)}; your own is package.module:Name."
        raise ConfigError(f"{key}: no sink {word!r}.{did_you_mean(word, WORDS.keys())} {known}")
    package, make = WORDS[word]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key}: {word} needs {package}, which is not installed: pip install 'jddp[{word}]'."
        )
    return ChosenSink(word, make, needs_run_dir=True)


def _of_object(name: str, found: Any, key: str) -> ChosenSink:
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    is_class = isinstance(found, type)
    if missing and (is_class or not callable(found)):
        raise ConfigError(
            f"{key}: {name} has no method {missing[0]!r}. A sink has log(record) and close()."
        )
    return ChosenSink(name, found if is_class or missing else lambda _: found)
