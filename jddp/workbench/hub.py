"""A run's weights as a folder of the Hugging Face Hub, which is uploaded and downloaded.

    config.json          from which transformers make the model, or the section `model` of the run
    model.safetensors
    README.md

`model.init_from` takes such a folder. Uploads and downloads are huggingface_hub's, with its tokens.
"""

import contextlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from jddp.checkpoint.folders import first_line
from jddp.checkpoint.reader import read_object
from jddp.checkpoint.weights import (
    EVALUATED,
    WHOLE,
    export,
    export_arrays,
    is_hub_folder,
    read_weights,
)
from jddp.ground.errors import ConfigError, DataError, FileSystemError, file_errors, report
from jddp.ground.typing import JsonObject
from jddp.trainer.runs.saved import Saved, config_in, model_in
from jddp.workbench.state_dicts import scheme_of, to_state_dict, unlike

CARD = """---
library_name: {library}
tags: [jax, flax]
---
Weights of step {step} of a run by jddp. `jddp train model.init_from=FOLDER` starts from them.
"""


def export_by_names(checkpoint: Path, file: Path, library: str) -> JsonObject:
    """Writes the parameters that a run evaluates into one file, by the names of a library.

    Args:
      checkpoint: Folder of the checkpoint, in the run's directory.
      file: New file, whose suffix names the format.
      library: The library, "torchvision" or "huggingface".

    Returns:
      The `config.json` from which the library makes the model; {} if it reads none.

    Raises:
      UsageError: If the run does not name its model, or one outside of the zoo.
      ConfigError: If the library has no such model.
      FileSystemError: If the checkpoint cannot be read, or the file cannot be written.
    """
    run_dir = checkpoint.parent.parent
    model = model_in(run_dir, config_in(run_dir), None)
    scheme = scheme_of(model, library)
    saved = Saved(checkpoint, read_object(checkpoint / "run.json"))
    params, model_state = saved.evaluated_values()
    tensors = to_state_dict(model, {"params": params, **model_state}, library)
    export_arrays(checkpoint, file, tensors)
    if fields := unlike(model, library):
        report(f"{library}'s {type(model).__name__} differs in fields of the model: {fields}")
    return {} if scheme.hub_config is None else scheme.hub_config(model, tensors)


def export_folder(checkpoint: Path, folder: Path, library: str | None) -> None:
    """Writes a new folder as on the Hub.

    Args:
      checkpoint: Folder of the checkpoint, in the run's directory.
      folder: The folder, which may not be there yet.
      library: The library by whose names it has the arrays; None for their paths.

    Raises:
      FileSystemError: If it is there, or cannot be written.
      Error: As `export_by_names`; nothing is left then.
    """
    with file_errors(f"{folder} cannot be written"):
        folder.mkdir()
    try:
        made: JsonObject = {}
        if library is None:
            export(checkpoint, folder / WHOLE, EVALUATED)
        else:
            made = export_by_names(checkpoint, folder / WHOLE, library)
        with file_errors(f"{folder} cannot be written"):
            _describe(checkpoint, folder, made)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _describe(checkpoint: Path, folder: Path, made: JsonObject) -> None:
    own = config_in(checkpoint.parent.parent)
    section = own.model.model_dump(include={"name", "target", "kwargs"}) if own else {}
    config = made or {"model": section}
    card = CARD.format(library="transformers" if made else "jddp", step=checkpoint.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(card)


def push(checkpoint: Path, repository: str, library: str | None) -> str:
    """Uploads weights into a repository of the Hub; a new one is private.

    Its README.md stays as it is, if there is one.

    Args:
      checkpoint: Folder of the checkpoint, in the run's directory.
      repository: Name of the repository, such as "user/name".
      library: The library by whose names it has the arrays; None for their paths.

    Returns:
      The URL of the commit.

    Raises:
      ConfigError: If huggingface_hub is not installed.
      FileSystemError: If the Hub refuses it, or cannot be reached.
      Error: As `export_folder`.
    """
    hub = _hub()
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "weights"
        export_folder(checkpoint, folder, library)
        with _hub_errors(repository):
            hub.create_repo(repository, private=True, exist_ok=True)
            is_described = hub.file_exists(repository, "README.md")
            done = hub.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=f"Step {checkpoint.name} of a run by jddp",
                ignore_patterns=["README.md"] if is_described else None,
            )
    return str(done.commit_url)


def pull(repository: str, folder: Path, *, revision: str | None = None) -> None:
    """Downloads weights from a repository of the Hub, and checks that all are there.

    Args:
      repository: Name of the repository, such as "user/name".
      folder: New or empty folder.
      revision: Branch, tag or commit; None for the main branch.

    Raises:
      ConfigError: If huggingface_hub is not installed.
      FileSystemError: If the folder is in use, the Hub refuses it, or cannot be reached.
      DataError: If the repository holds no safetensors, or lacks a part of them.
    """
    hub = _hub()
    with file_errors(f"{folder} cannot be written"):
        folder.mkdir(exist_ok=True)
        if any(folder.iterdir()):
            raise FileSystemError(f"{folder} is not empty. Name a new folder.")
    wanted = ["model*.safetensors", "*.json", "README.md"]
    with _hub_errors(repository):
        hub.snapshot_download(
            repository, revision=revision, local_dir=folder, allow_patterns=wanted
        )
    if not is_hub_folder(folder):
        raise DataError(f"{repository} holds no model.safetensors. Choose another repository.")
    read_weights(folder)


def _hub() -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            "push and pull need huggingface_hub, which is not installed: pip install 'jddp[hub]'."
        ) from error


@contextlib.contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of huggingface_hub, of its network client, or of the file system
        reason = first_line(error).rstrip(".")
        raise FileSystemError(
            f"{repository}: {reason}. Check its name, the network, and your token (hf auth login)."
        ) from error
