"""Resolve what a config names: data, model, loss, optimizer, before anything is read or compiled.

A registered name is looked up in its room; a target, `package.module:Name`, is imported. Mistakes
in several sections are collected, so that one run of the command shows them all.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jddp.config import Config
from jddp.data import Source, make_data_set, make_source, spec_of
from jddp.errors import ConfigError
from jddp.losses import LOSSES
from jddp.models.make import make_model
from jddp.names import accepted_names, check_arguments, did_you_mean, resolve_target
from jddp.optimizers import make_optimizer, make_schedule

Schedule = Callable[[int], Any]


@dataclass(frozen=True)
class Parts:
    """What a config names, made.

    Attributes:
      source: Knows the shapes of the data.
      model: A Linen or NNX module.
      loss_fn: `loss_fn(model, batch[, train])`.
      make_optimizer: Gives the optimizer, and the schedule it follows, for a number of steps.
    """

    source: Source
    model: Any
    loss_fn: Callable[..., Any]
    make_optimizer: Callable[[int], tuple[Any, Schedule | None]]


def resolve_parts(config: Config) -> Parts:
    """Makes every part that `config` names.

    Raises:
      ConfigError: With all that cannot be resolved, one line each.
      DataError: If the user's own data are bad.
    """
    mistakes: list[str] = []

    def attempt(resolve: Callable[[Config], Any]) -> Any:
        try:
            return resolve(config)
        except ConfigError as error:
            mistakes.append(str(error))

    optimizer = attempt(_optimizer)
    model, loss_fn, source = attempt(_model), attempt(_loss), attempt(_source)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return Parts(source, model, loss_fn, optimizer)


def _source(config: Config) -> Source:
    data = config.data
    if data.name is not None:
        return make_source(data.name, source=data.source, directory=data.dir, kwargs=data.kwargs)
    assert data.target is not None
    found = resolve_target(data.target, key="data.target")
    check_arguments(found, data.kwargs, key="data.kwargs")
    pair = found(**data.kwargs)
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ConfigError(
            f"data.target: {data.target} gives {type(pair).__name__}. It must give (train, test)."
        )
    data_set = make_data_set(data.target, *pair)
    return Source(data.target, spec_of(data_set.train), lambda: data_set)


def _model(config: Config) -> Any:
    model = config.model
    factory: Any = model.name
    if model.target is not None:
        factory = resolve_target(model.target, key="model.target")
    return make_model(factory, kwargs=model.kwargs, seed=config.seed)


def _loss(config: Config) -> Callable[..., Any]:
    loss = config.loss
    if loss.target is not None:
        found = resolve_target(loss.target, key="loss.target")
    elif loss.name in LOSSES:
        found = LOSSES[loss.name]
    else:
        raise ConfigError(
            f"loss.name: no loss {loss.name!r}.{did_you_mean(str(loss.name), LOSSES.keys())} "
            f"Known: {', '.join(sorted(LOSSES))}."
        )
    filled = accepted_names(found, key="loss.target") - loss.kwargs.keys()  # model, batch, train
    check_arguments(found, loss.kwargs, key="loss.kwargs", filled=filled)
    return functools.partial(found, **loss.kwargs) if loss.kwargs else found


def _optimizer(config: Config) -> Callable[[int], tuple[Any, Schedule | None]]:
    section, schedule = config.optimizer, config.optimizer.schedule
    factory: Any = section.name
    if section.target is not None:
        factory = resolve_target(section.target, key="optimizer.target")

    def make(num_steps: int) -> tuple[Any, Schedule | None]:
        rate = make_schedule(
            schedule.name,
            learning_rate=section.learning_rate,
            num_steps=num_steps,
            warmup_steps=section.warmup_steps,
            kwargs=schedule.kwargs,
        )
        return make_optimizer(
            factory,
            schedule=rate,
            kwargs=section.kwargs,
            decay_norms_and_biases=section.decay_norms_and_biases,
        )

    make(1)  # So that mistakes show before the data, which say how many steps there are, are read.
    return make
