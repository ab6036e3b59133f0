"""Reads a finished or interrupted run from its directory: its config, its model, its checkpoints.

A run directory is data; which of the code that it names may be imported, `trust` decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jddp.checkpoint import reader
from jddp.checkpoint.folders import finished
from jddp.checkpoint.remote import local_copy
from jddp.config.files import read_yaml
from jddp.config.schema import Config
from jddp.errors import FileSystemError, UsageError
from jddp.job.trust import check_trust, resolve_model
from jddp.modules.functional import functional
from jddp.zoo.models import make_model

T = TypeVar("T")
STATE_OPTIONS = ("batch_norm", "per_replica", "state_reduction")  # of DataParallel, in run.json


def load(run_dir: str | Path, *, model: Any = None, trust: str | None = None) -> Any:
    """Returns the model of a run, with the values of its newest checkpoint.

    The directory is not trusted: of all names in its config only the model is resolved, and only
    inside `jddp.zoo.models` unless `trust` permits more. `jddp.Run.open` gives the whole run.

    Args:
      run_dir: A run directory, or its URL.
      model: The module to fill, in place of the one that the config names. A run of
        `DataParallel.fit` has no config, and needs it.
      trust: "here" to import a model whose code lies in the current folder; "package" to import the
        module class that the config names, wherever it is, which runs the code of its package;
        "config" to also call a function that the config names.

    Returns:
      A bound Linen module, or an NNX module in eval mode, with the parameters that the run itself
      evaluated: their moving average under `train.eval_params=ema`.

    Raises:
      UsageError: If the model is not trusted, or no module class, or not given for a run that has
        no config; or if there is no run.
      ConfigError: If the config cannot be read.
      FileSystemError: If there is no checkpoint.
    """
    run_dir = local_copy(run_dir)
    module = model_in(run_dir, config_in(run_dir), trust) if model is None else model
    return read_saved(run_dir, None, lambda saved: _filled(module, saved))


def _filled(module: Any, saved: "Saved") -> Any:
    """The module with the parameters that a run itself evaluated."""
    world = saved.beside["world"]
    options = {name: world[name] for name in STATE_OPTIONS if name in world}
    form = functional(module, **options)
    values, state = saved.read([saved.evaluated])
    if form.values is not None:
        values, state = _as(form.values[0], values), _as(form.values[1], state)
    filled = form.rebuild(*jax.tree.map(jnp.asarray, (values, state)))
    return module.bind(filled) if isinstance(filled, Mapping) else filled


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the run data beside its arrays.

    Attributes:
      folder: Folder of the checkpoint.
      beside: The run data.
    """

    folder: Path
    beside: dict[str, Any]

    @property
    def evaluated(self) -> str:
        """The field of the parameters that the run itself evaluated."""
        is_ema = self.beside.get("plan", {}).get("eval_params") == "ema"
        return "ema_params" if is_ema else "params"

    def read(self, fields: Sequence[str]) -> list[Any]:
        """The fields, and the model's other state, with the replicas' own averaged."""
        saved = reader.read_values(self.folder, [*fields, "model_state"])
        return [saved[name] for name in (*fields, "model_state")]


def read_saved(run_dir: Path, chosen: int | str | None, read: Callable[[Saved], T]) -> T:
    """Reads a checkpoint of a run, which may be training.

    Args:
      run_dir: The run directory.
      chosen: A step; or a folder of checkpoints, such as "best", of which the newest undamaged one
        is taken; or both, "best/400". By default the newest of "checkpoints".
      read: Function that reads what is needed of it; called again if the run removes it meanwhile.

    Returns:
      What `read` returns.

    Raises:
      FileSystemError: If there is none, or it is damaged.
    """

    def read_folder(folder: Path) -> T:
        return read(Saved(folder, reader.read_object(folder / "run.json")))

    return reader.read_standing(lambda: _find(run_dir, chosen), read_folder)


def _find(run_dir: Path, chosen: int | str | None) -> Path:
    text = "checkpoints" if chosen is None else str(chosen)
    above, _, step = text.rpartition("/")
    directory = run_dir / ((above or "checkpoints") if step.isdecimal() else text)
    if not step.isdecimal():
        step = str(reader.newest_sound(directory))
    elif int(step) not in (steps := finished(directory)):
        raise FileSystemError(f"{directory} holds no step {step}. Choose one of {steps}.")
    elif fault := reader.find_fault(directory / step):
        raise FileSystemError(f"{directory / step} is damaged: {fault}. Choose another.")
    return directory / step


def config_in(run_dir: Path) -> Config | None:
    """The config of a run; None for a run of `DataParallel.fit`, which keeps none.

    Raises:
      UsageError: If there is no run.
      ConfigError: If the config cannot be read.
    """
    path = run_dir / "config.yaml"
    if path.exists():
        return Config(**read_yaml(path))
    if not (run_dir / "checkpoints").is_dir():
        raise UsageError(
            f"{run_dir} is no run directory: it holds neither config.yaml nor checkpoints. Name "
            "the run.dir, or run_dir=, of a run."
        )
    return None


def model_in(run_dir: Path, config: Config | None, trust: str | None) -> Any:
    """The module that a config names, as far as `trust` permits."""
    check_trust(trust)
    if config is None:
        keeps_none = f"{run_dir} holds a run of DataParallel.fit, which keeps no config."
        raise UsageError(
            f"{keeps_none} Give model=, the module that was trained.",
            in_shell=f"{keeps_none} A command cannot make its model; in Python there is "
            "jddp.Run.open(run_dir, model=, loss_fn=).",
        )
    section = config.model
    found = section.name if section.target is None else resolve_model(config, trust, run_dir)
    return make_model(found, kwargs=section.kwargs)


def _as(own: Any, found: Any) -> Any:
    """Gives values that were read the keys of the module's own, some of which are numbers.

    A module keeps its random keys, which are never used in evaluation.
    """
    if isinstance(own, dict):
        return {key: _as(value, found.get(str(key), {})) for key, value in own.items()}
    return own if jnp.issubdtype(own.dtype, jax.dtypes.prng_key) else found
