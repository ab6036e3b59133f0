"""Reads a finished or interrupted run from its directory: its config, its model, its checkpoints.

A run directory is data: its config may come from somebody else. By default only models, losses and
data of jddp itself are found by their names; a word of yours permits more.

| word      | permits                                                                            |
|-----------|------------------------------------------------------------------------------------|
| "here"    | code that a file of the current folder defines, outside of the run directory        |
| "package" | the model's class in any package, whose code runs when it is imported               |
| "config"  | all code that the config names, as for a config on the command line                 |
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jddp.checkpoint import reader
from jddp.checkpoint.folders import finished
from jddp.config.files import read_stored
from jddp.config.schema import Config
from jddp.engine.evaluation import with_average
from jddp.engine.state import Values
from jddp.ground.errors import FileSystemError, UsageError, check_choice
from jddp.ground.names import resolve_target
from jddp.ground.typing import JsonObject
from jddp.trainer.saving import BEST
from jddp.zoo.models import Module, is_module_class, make_model

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the run data that it keeps with its arrays.

    Attributes:
      folder: Folder of the checkpoint.
      beside: The run data.
    """

    folder: Path
    beside: JsonObject

    @property
    def evaluated(self) -> str:
        """The parameters that the run itself evaluated, "params" or "ema"."""
        return str(self.beside.get("plan", {}).get("eval_params", "params"))

    def read(self, fields: Sequence[str]) -> list[Any]:
        """The fields, and the model's other state; per-replica arrays are averaged."""
        saved = reader.read_values(self.folder, [*fields, "model_state"])
        return [saved[name] for name in (*fields, "model_state")]

    def evaluated_values(self) -> Values:
        """The parameters that the run evaluated, and their other state."""
        if self.evaluated == "params":
            params, model_state = self.read(["params"])
            return params, model_state
        params, ema_state, model_state = self.read(["ema_params", "ema_state"])
        return params, with_average(model_state, ema_state)


def read_saved(run_dir: Path, chosen: int | str | None, read: Callable[[Saved], T]) -> T:
    """Reads a checkpoint of a run, which may be training.

    Args:
      run_dir: The run directory.
      chosen: A step; or a folder of checkpoints, to use its newest undamaged one, or "best", to use
        its best undamaged one; or both, "best/400". By default the newest in "checkpoints".
      read: Function that reads a checkpoint; called again if the run removes it meanwhile.

    Returns:
      The result of `read`.

    Raises:
      FileSystemError: If there is no checkpoint, or it is damaged.
    """

    def read_folder(folder: Path) -> T:
        return read(Saved(folder, reader.read_object(folder / "run.json")))

    return reader.read_standing(lambda: _find(run_dir, chosen), read_folder)


def _find(run_dir: Path, chosen: int | str | None) -> Path:
    text = "checkpoints" if chosen is None else str(chosen)
    above, _, step = text.rpartition("/")
    directory = run_dir / ((above or "checkpoints") if step.isdecimal() else text)
    if not step.isdecimal():
        step = str(_first_sound(directory))
    elif int(step) not in (steps := finished(directory)):
        raise FileSystemError(f"{directory} holds no step {step}. Choose one of {steps}.")
    elif fault := reader.find_fault(directory / step):
        raise FileSystemError(f"{directory / step} is damaged: {fault}. Choose another.")
    return directory / step


def _first_sound(directory: Path) -> int:
    """The best undamaged checkpoint of a folder; where none is ranked, the newest.

    The newest has the ranking: each checkpoint that changes it is saved.
    """
    newest = reader.newest_sound(directory)
    if directory.name != BEST:
        return newest
    ranked = reader.read_object(directory / str(newest) / "run.json").get("best", [])
    there = [step for step in ranked if step in finished(directory)]
    return next((x for x in there if reader.find_fault(directory / str(x)) is None), newest)


def config_in(run_dir: Path) -> Config | None:
    """The config of a run; None for a run of `jddp.fit`, which keeps none.

    Raises:
      UsageError: If there is no run.
      ConfigError: If the config cannot be read.
    """
    path = run_dir / "config.yaml"
    if path.exists():
        return read_stored(path)
    if not (run_dir / "checkpoints").is_dir():
        raise UsageError(
            f"{run_dir} is no run directory: it has neither config.yaml nor checkpoints. Give the "
            "run.dir or run_dir= of a run."
        )
    return None


def kept_of_data(run_dir: Path | None) -> JsonObject:
    """The data of a run's newest start, with classes and encoding; empty if it kept none."""
    try:
        first = json.loads((Path(run_dir or "") / "manifest.json").read_bytes())
        return dict(first.get("later_starts", [first])[-1]["data"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # An old run kept none.
        return {}


def model_in(run_dir: Path, config: Config | None, trust: str | None) -> Module:
    """The module that a config names, as far as `trust` permits."""
    check_choice("trust", trust, TRUST)
    if config is None:
        keeps_none = f"{run_dir} holds a run of jddp.fit, which saves no config."
        raise UsageError(
            f"{keeps_none} Give model=, the module that was trained.",
            in_shell=f"{keeps_none} A command cannot make its model. In Python, use "
            "jddp.open_run(run_dir, model=, loss_fn=).",
        )
    section = config.model
    found = section.name if section.target is None else resolve_model(config, trust, run_dir)
    return make_model(found, kwargs=section.kwargs)


TRUST = (None, "here", "package", "config")
OWN_MODELS = "jddp.zoo.models"


def resolve_model(config: Config, trust: str | None, run_dir: Path) -> object:
    """The class or function that makes the model of a config, as far as `trust` permits.

    Args:
      config: Config of the run, whose model has a target.
      trust: One of `TRUST`.
      run_dir: The run directory.

    Raises:
      UsageError: If it may not be imported, or is neither permitted nor a Flax module class.
    """
    target = str(config.model.target)
    module = target.partition(":")[0]
    is_own = f"{module}.".startswith(f"{OWN_MODELS}.")
    is_here = trust == "here" and _is_here(module, run_dir)
    if not (is_own or is_here or trust in ("package", "config")):
        raise refusal("model.target", config, "model=")
    found = resolve_target(target, key="model.target")
    is_permitted = trust == "config" or (is_here and _is_here(_module_of(found), run_dir))
    if not (is_permitted or is_module_class(found)):
        raise UsageError(
            f"model.target {target!r} is no Flax module class. If you trust all code that the "
            "config of the run names, add trust='config' (--trust config)."
        )
    return found


def is_trusted(key: str, config: Config, trust: str | None, run_dir: Path) -> bool:
    """Whether the target at a key of a config, of the loss or the data, may be imported."""
    target = _target_at(key, config)
    if target is None or trust == "config":
        return True
    # An object that a file of the folder only imports is not defined there.
    return (
        trust == "here"
        and _is_here(target.partition(":")[0], run_dir)
        and _is_here(_module_of(resolve_target(target, key=key)), run_dir)
    )


def refusal(key: str, config: Config, instead: str) -> UsageError:
    """The error of a model, a loss, or data, that may not be imported.

    Args:
      key: Key of the config that names it.
      config: Config of the run.
      instead: Argument that can be given in its place.
    """
    what = f"{key} {_target_at(key, config)!r}, which the run directory names, is not imported."
    trusted = "here, for code of this folder; package, for the class of the model; or config"
    return UsageError(
        f"{what} Give {instead}; or trust=: {trusted}.", in_shell=f"{what} Add --trust {trusted}."
    )


def _target_at(key: str, config: Config) -> str | None:
    section, _, name = key.partition(".")
    found: str | None = getattr(getattr(config, section), name)
    return found


def _module_of(found: object) -> str:
    return str(getattr(found, "__module__", ""))


def _is_here(module: str, run_dir: Path) -> bool:
    """Whether a module is a file of the current folder; imports nothing.

    A file of the run directory is not trusted, though it may lie in the current folder.
    """
    here = Path.cwd().resolve()
    path = here.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            inside = file.resolve()
            return inside.is_relative_to(here) and not inside.is_relative_to(run_dir.resolve())
    return False
