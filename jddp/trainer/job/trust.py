"""Decides which code that a run directory names may be imported.

A run directory is data: its config may come from somebody else. By default only models, losses and
data of jddp itself are found by their names; a word of yours permits more.

| word      | permits                                                                            |
|-----------|------------------------------------------------------------------------------------|
| "here"    | code that a file of the current folder defines, outside of the run directory        |
| "package" | the model's class in any package, whose code runs when it is imported               |
| "config"  | all code that the config names, as for a config on the command line                 |
"""

from pathlib import Path

from jddp.config.schema import Config
from jddp.ground.errors import UsageError, check_choice
from jddp.ground.names import resolve_target
from jddp.zoo.models import is_module_class

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
    is_own = f"{target.partition(':')[0]}.".startswith(f"{OWN_MODELS}.")
    is_here = trust == "here" and _lies_here(target, run_dir)
    if not (is_own or is_here or trust in ("package", "config")):
        raise UsageError(
            f"model.target {target!r}, which the run directory names, is not imported. Give "
            "model=, the module itself; or trust='here', if its code lies in the current folder; "
            "or trust='package', if you trust that package's code.",
            in_shell=f"model.target {target!r}, which the run directory names, is not imported. "
            "Add --trust here, if its code lies in this folder; or --trust package, if you trust "
            "that package's code.",
        )
    found = resolve_target(target, key="model.target")
    is_permitted = trust == "config" or (is_here and _is_defined_here(found, run_dir))
    if not (is_permitted or is_module_class(found)):
        raise UsageError(
            f"model.target {target!r} is no Flax module class. Give model=; or trust='config', if "
            "you trust all code that the config names.",
            in_shell=f"model.target {target!r} is no Flax module class. Add --trust config, if you "
            "trust all code that the config of the run names.",
        )
    return found


def is_trusted(key: str, config: Config, trust: str | None, run_dir: Path) -> bool:
    """Whether the target at a key of a config, of the loss or the data, may be imported."""
    target = _target_at(key, config)
    if target is None or trust == "config":
        return True
    if trust != "here" or not _lies_here(target, run_dir):
        return False
    return _is_defined_here(resolve_target(target, key=key), run_dir)


def refusal(key: str, config: Config, instead: str) -> UsageError:
    """The error of a loss, or of data, that may not be imported.

    Args:
      key: Key of the config that names it.
      config: Config of the run.
      instead: Argument that can be given in its place.
    """
    what = f"{key} {_target_at(key, config)!r}, which the run directory names, is not imported."
    return UsageError(
        f"{what} Give {instead}; or trust='here', if its code lies in the current folder; or "
        "trust='config', if you trust all code that the config names.",
        in_shell=f"{what} Add --trust here, if its code lies in this folder; or --trust config, if "
        "you trust all code that the config of the run names.",
    )


def check_trust(trust: str | None) -> None:
    """Refuses a word that is not in `TRUST`.

    Raises:
      ConfigError: If the word is not in `TRUST`.
    """
    check_choice("trust", trust, TRUST)


def _target_at(key: str, config: Config) -> str | None:
    section, _, name = key.partition(".")
    found: str | None = getattr(getattr(config, section), name)
    return found


def _lies_here(target: str, run_dir: Path) -> bool:
    """Whether the module of a target is a file of the current folder; imports nothing.

    A file of the run directory is not trusted, though it may lie in the current folder.
    """
    return _is_here(target.partition(":")[0], run_dir)


def _is_defined_here(found: object, run_dir: Path) -> bool:
    """Whether an object is defined in the current folder, not only imported by a file of it."""
    return _is_here(str(getattr(found, "__module__", "")), run_dir)


def _is_here(module: str, run_dir: Path) -> bool:
    here = Path.cwd().resolve()
    path = here.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            inside = file.resolve()
            return inside.is_relative_to(here) and not inside.is_relative_to(run_dir.resolve())
    return False
