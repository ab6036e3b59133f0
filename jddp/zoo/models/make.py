"""A model from its name, or from your class.

    module = make_model("gpt", kwargs={"num_layers": 2})
    module = make_model(MyNet, kwargs={"width": 64}, seed=1)   # an NNX class gets its rngs

An NNX module makes its values when it is made, so it needs a seed; a Linen module makes them later.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jddp.errors import ConfigError
from jddp.zoo.models import MODELS
from jddp.zoo.names import accepted_names, check_arguments, did_you_mean

Module = nn.Module | nnx.Module


def make_model(factory: Any, *, kwargs: Mapping[str, Any], seed: int = 0) -> Module:
    """Returns a Flax module, made with the given arguments.

    Args:
      factory: Key of `MODELS`, or a module class, or a function that returns a module.
      kwargs: Arguments of the factory; `rngs` is added where it is one of them.
      seed: Seed of `rngs`.

    Raises:
      ConfigError: If there is no such model, it does not take these arguments, or it returns no
        module.
    """
    make = factory
    if isinstance(factory, str):
        if factory not in MODELS:
            meant = did_you_mean(factory, MODELS.keys())
            raise ConfigError(
                f"model.name: no model {factory!r}.{meant} Known: {', '.join(sorted(MODELS))}."
            )
        make = MODELS[factory]
    check_arguments(make, kwargs, key="model.kwargs", filled=["rngs"])
    _check_dtype(kwargs.get("dtype", "float32"))
    takes_rngs = "rngs" in accepted_names(make, key="model.target")
    rngs = {"rngs": nnx.Rngs(seed)} if takes_rngs else {}
    module = make(**rngs, **kwargs)
    if not isinstance(module, Module):
        raise ConfigError(f"model.target: {make!r} returns {module!r}, which is no Flax module.")
    return module


def _check_dtype(dtype: Any) -> None:
    try:
        jnp.dtype(dtype)
    except TypeError:
        meant = did_you_mean(str(dtype), ["float32", "bfloat16", "float16"])
        raise ConfigError(f"model.kwargs.dtype: {dtype!r} is no dtype.{meant}") from None


def is_module_class(found: Any) -> bool:
    """Whether `found` is a class of Linen or NNX modules."""
    return isinstance(found, type) and issubclass(found, Module)
