"""Loads the model of a run from its directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jddp.checkpoint.arrays import layouts_in
from jddp.checkpoint.format_1 import merge_by_model
from jddp.checkpoint.reader import newest_sound, read_described, read_object
from jddp.checkpoint.reader import read_values as read_fields
from jddp.config.files import read_values
from jddp.config.permissions import expand
from jddp.config.schema import Config
from jddp.errors import UsageError
from jddp.modules.functional import functional
from jddp.zoo.models import is_module_class, make_model
from jddp.zoo.names import resolve_target

OWN_MODELS = "jddp.zoo.models"
STATE_OPTIONS = ("batch_norm", "per_replica", "state_reduction")  # of DataParallel, in run.json


def load(run_dir: str | Path, *, model: Any = None, trust: str | None = None) -> Any:
    """Returns the model of a run, with the values of its newest checkpoint.

    The directory is not trusted: of all names in its config only the model is resolved, and only
    inside `jddp.zoo.models` unless `trust` permits more.

    Args:
      run_dir: A run directory.
      model: The module to fill, in place of the one that the config names. A run of
        `DataParallel.fit` has no config, and needs it.
      trust: "package" to import the module class that the config names, wherever it is. Importing
        it runs the code of its package.

    Returns:
      A bound Linen module, or an NNX module in eval mode, with the parameters that the run itself
      evaluated: their moving average under `train.eval_params=ema`.

    Raises:
      UsageError: If the model is not trusted, or no module class, or not given for a run that has
        no config.
      ConfigError: If the config cannot be read.
      FileSystemError: If there is no checkpoint.
    """
    run_dir = expand(run_dir)
    module = _model_of(run_dir, trust) if model is None else model
    folder = run_dir / "checkpoints" / str(newest_sound(run_dir / "checkpoints"))
    run = read_object(folder / "run.json")
    options = {name: run["world"][name] for name in STATE_OPTIONS if name in run["world"]}
    params = "ema_params" if run.get("plan", {}).get("eval_params") == "ema" else "params"
    saved = read_fields(folder, [params, "model_state"])
    values, state = saved[params], saved["model_state"]
    form = functional(module, **options)
    if form.values is not None:
        values, state = _as(form.values[0], values), _as(form.values[1], state)
    if not layouts_in(read_described(folder)):
        state = merge_by_model(state, form.keeps_own)
    filled = form.rebuild(*jax.tree.map(jnp.asarray, (values, state)))
    return module.bind(filled) if isinstance(filled, Mapping) else filled


def _model_of(run_dir: Path, trust: str | None) -> Any:
    path = run_dir / "config.yaml"
    if not path.exists() and (run_dir / "checkpoints").is_dir():
        raise UsageError(
            f"{run_dir} holds a run of DataParallel.fit, which keeps no config. Give model=, the "
            "module that was trained."
        )
    section = Config(**read_values(path)).model
    target = section.target
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


def _as(own: Any, found: Any) -> Any:
    """Gives values that were read the keys of the module's own, some of which are numbers.

    A module keeps its random keys, which are never used in evaluation.
    """
    if isinstance(own, dict):
        return {key: _as(value, found.get(str(key), {})) for key, value in own.items()}
    return own if jnp.issubdtype(own.dtype, jax.dtypes.prng_key) else found
