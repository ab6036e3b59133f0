"""Calls of functions that trace or run the user's model, whose errors get a way out."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax

from jddp.distributed.coordination import computing
from jddp.ground.errors import ConfigError
from jddp.ground.typing import PyTree

Result = TypeVar("Result")
_CHECKS = {"jax_debug_nans": jax.debug_nans, "jax_debug_infs": jax.debug_infs}
_OF_CONSTRAINTS = ("is not found in mesh", "passed to with_sharding_constraint")


def run_compiled(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a compiled function, for which the devices of other processes may be awaited."""
    with computing(args):
        return call(function, *args)


def checks_for_nan() -> list[Callable[[bool], contextlib.AbstractContextManager[None]]]:
    """The checks of JAX for NaN and infinity that are on: `jax.debug_nans`, `jax.debug_infs`."""
    return [check for name, check in _CHECKS.items() if getattr(jax.config, name)]


def _checked() -> contextlib.AbstractContextManager[None]:
    """While open, `jax_debug_nans` and `jax_debug_infs` are on in this thread if they are at all.

    JAX leaves the check off in a thread that was in a context with it off, and some of its own
    functions are, also those that look for the operation that made the first NaN.
    """
    checks = checks_for_nan()
    return checks[0](True) if checks else contextlib.nullcontext()


def call(function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls a function that traces the user's model.

    Raises:
      ConfigError: If the model names an axis that there is not, or uses a value of another trace.
    """
    try:
        with _checked():
            return function(*args)
    except ValueError as error:
        # Of a constraint that was imported by name before the first model ran: `modules.base`.
        if not any(words in str(error) for words in _OF_CONSTRAINTS):
            raise
        raise ConfigError(
            f"The model or loss constrains an array to axes of a mesh ({error}), and here each "
            "replica has its own rows whole. Call it as jax.lax.with_sharding_constraint, which is "
            "then left out; or leave it out."
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        name = str(error).split("unbound axis name:")[-1].strip().split(" ")[0].rstrip(".")
        raise ConfigError(
            f"The model or loss uses axis {name!r}, which is not the axis of the replicas. Name "
            f"that so: mesh=jax.make_mesh((n,), ({name!r},)), mesh.axis_name={name} in a config."
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise ConfigError(
            "The model or loss uses a value of another trace, such as one that it kept from an "
            "earlier call. Hand it what it needs in the batch, or as constants=."
        ) from error
