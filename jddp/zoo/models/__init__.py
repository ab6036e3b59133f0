"""Models by name. Any other Flax module can be trained too.

    model = MODELS["gpt"](num_layers=6, width=384, dtype="bfloat16")
    model = make_model("gpt", kwargs={"num_layers": 2})       # a config's name and arguments
    model = make_model(MyNet, kwargs={"width": 64}, seed=1)   # an NNX class gets its rngs

They are plain Flax: no mesh, no axis names (batch norm is synchronized by `DataParallel`),
parameters in float32 and arithmetic in `dtype`, outputs in float32. Linen modules are called as
`model(inputs, train)`; `CNN_NNX` is the small network in NNX. An NNX module makes its values when
it is made, so it needs a seed; a Linen module makes them later.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jddp.ground.errors import ConfigError
from jddp.ground.names import accepted_names, check_arguments, did_you_mean, look_up
from jddp.zoo.models.resnet import ResNet, resnet18, resnet50
from jddp.zoo.models.small import CNN, CNN_NNX, MLP
from jddp.zoo.models.transformer import GPT, ViT, gpt2, vit_b16

Module = nn.Module | nnx.Module

MODELS: dict[str, Callable[..., Module]] = {"cnn": CNN, "cnn_nnx": CNN_NNX, "gpt": GPT}
MODELS |= {"gpt2": gpt2, "mlp": MLP, "resnet18": resnet18, "resnet50": resnet50}
MODELS |= {"vit": ViT, "vit_b16": vit_b16}

__all__ = ["CNN", "CNN_NNX", "GPT", "MLP", "MODELS", "ResNet", "ViT"]
__all__ += ["gpt2", "resnet18", "resnet50", "vit_b16"]


def make_model(factory: Any, *, kwargs: Mapping[str, object], seed: int = 0) -> Module:
    """Returns a Flax module, made with the given arguments.

    Args:
      factory: Key of `MODELS`, or a module class, or a function that returns a module.
      kwargs: Arguments of the factory; `rngs` is added where it is one of them.
      seed: Seed of `rngs`.

    Raises:
      ConfigError: If there is no such model, it does not take these arguments, or it returns no
        module.
    """
    is_name = isinstance(factory, str)
    make = look_up(factory, MODELS, key="model.name", kind="model") if is_name else factory
    check_arguments(make, kwargs, key="model.kwargs", filled=["rngs"])
    _check_dtype(kwargs.get("dtype"))
    rngs = {"rngs": nnx.Rngs(seed)} if "rngs" in accepted_names(make, key="model.target") else {}
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


def is_module_class(found: object) -> bool:
    """Whether `found` is a class of Linen or NNX modules."""
    return isinstance(found, type) and issubclass(found, Module)
