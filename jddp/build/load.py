"""Give back the model of a run, from its directory alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jddp.checkpoint.read import read_newest
from jddp.config import Config, read_values
from jddp.errors import UsageError
from jddp.flaxmodel import functional
from jddp.models.make import is_module_class, make_model
from jddp.names import resolve_target
from jddp.state import Kind, float_kinds

OWN_MODELS = "jddp.models"


def load(run_dir: str | Path, *, model: Any = None, trust: str | None = None) -> Any:
    """Returns the model of a run, with the values of its newest checkpoint.

    The directory is taken as data: of all that its config names only the model is resolved, and
    that only inside `jddp.models` unless `trust` says otherwise.

    Args:
      run_dir: A run directory.
      model: The module to fill, in place of the one that the config names.
      trust: "package" to import the module class that the config names, wherever it is. Importing
        it runs the code of its package.

    Returns:
      A bound Linen module, or an NNX module in eval mode, with the parameters that the run itself
      evaluated: their moving average under `train.eval_params=ema`.

    Raises:
      UsageError: If the model is not trusted, or no module class.
      ConfigError: If the config cannot be read.
      FileSystemError: If there is no checkpoint.
    """
    run_dir = Path(run_dir)
    config = Config(**read_values(run_dir / "config.yaml"))
    module = _model_of(config, trust) if model is None else model
    params = "ema_params" if config.train.eval_params == "ema" else "params"
    saved = read_newest(run_dir / "checkpoints", [params, "model_state"])
    values, state = saved[params], saved["model_state"]
    section = config.ddp
    form = functional(module, batch_norm=section.batch_norm, per_replica=section.per_replica)
    if form.values is not None:
        values, state = _as(form.values[0], values), _as(form.values[1], state)
    state = jax.tree.map(_mean_over_replicas, state, float_kinds(state, form.keeps_own))
    filled = form.rebuild(*jax.tree.map(jnp.asarray, (values, state)))
    return module.bind(filled) if isinstance(filled, Mapping) else filled


def _model_of(config: Config, trust: str | None) -> Any:
    section, target = config.model, config.model.target
    if target is None:
        return make_model(section.name, kwargs=section.kwargs)
    package = target.partition(":")[0]
    is_own = package == OWN_MODELS or package.startswith(f"{OWN_MODELS}.")
    if not is_own and trust != "package":
        raise UsageError(
            f"load does not import {target!r}, which the run directory names. Give model=, the "
            "module itself; or trust='package', if you trust that package's code."
        )
    found = resolve_target(target, key="model.target")
    if not is_module_class(found):
        raise UsageError(f"model.target {target!r} is no Flax module class. Give model=.")
    return make_model(found, kwargs=section.kwargs)


def _mean_over_replicas(x: Any, kind: Kind) -> Any:
    return x.mean(0, dtype=x.dtype) if kind.is_per_replica else x


def _as(own: Any, found: Any) -> Any:
    """Gives values that were read the keys of the module's own, some of which are numbers.

    A module keeps its random keys, which are never used in evaluation.
    """
    if isinstance(own, dict):
        return {key: _as(value, found.get(str(key), {})) for key, value in own.items()}
    return own if jnp.issubdtype(own.dtype, jax.dtypes.prng_key) else found
