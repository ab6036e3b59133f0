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
    config, checkpoints = _config_of(run_dir), run_dir / "checkpoints"
    if config is None and model is None:
        raise UsageError(
            f"{run_dir} holds a run of DataParallel.fit, which keeps no config. Give model=, the "
            "module that was trained."
        )
    module = _model_of(config, trust) if model is None else model
    folder = checkpoints / str(newest_sound(checkpoints))
    eval_params, options = _options_of(config, folder)
    params = "ema_params" if eval_params == "ema" else "params"
    saved = read_fields(folder, [params, "model_state"])
    values, state = saved[params], saved["model_state"]
    form = functional(module, **options)
    if form.values is not None:
        values, state = _as(form.values[0], values), _as(form.values[1], state)
    if not layouts_in(read_described(folder)):
        state = merge_by_model(state, form.keeps_own)
    filled = form.rebuild(*jax.tree.map(jnp.asarray, (values, state)))
    return module.bind(filled) if isinstance(filled, Mapping) else filled


def _config_of(run_dir: Path) -> Config | None:
    """The config of a run; None for one that was started from objects."""
    path = run_dir / "config.yaml"
    is_of_objects = not path.exists() and (run_dir / "checkpoints").is_dir()
    return None if is_of_objects else Config(**read_values(path))


def _options_of(config: Config | None, folder: Path) -> tuple[str, dict[str, Any]]:
    """The evaluated parameters and the options of state, from a config or a checkpoint."""
    names = ("batch_norm", "per_replica", "state_reduction")
    if config is not None:
        return config.train.eval_params, {name: getattr(config.ddp, name) for name in names}
    about = read_object(folder / "run.json")
    options = {name: about["world"][name] for name in names if name in about["world"]}
    return about.get("plan", {}).get("eval_params", "params"), options


def _model_of(config: Config | None, trust: str | None) -> Any:
    assert config is not None, "a run without one needs model="
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


def _as(own: Any, found: Any) -> Any:
    """Gives values that were read the keys of the module's own, some of which are numbers.

    A module keeps its random keys, which are never used in evaluation.
    """
    if isinstance(own, dict):
        return {key: _as(value, found.get(str(key), {})) for key, value in own.items()}
    return own if jnp.issubdtype(own.dtype, jax.dtypes.prng_key) else found
