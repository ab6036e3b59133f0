"""A run's weights as a folder of the Hugging Face Hub.

    config.json          from which transformers make the model, or the section `model` of the run
    model.safetensors
    README.md

`model.init_from` takes such a folder. Its uploads and downloads are `hf upload` and `hf download`.
"""

import json
import shutil
from pathlib import Path

from jddp.checkpoint.reader import read_object
from jddp.checkpoint.weights import WHOLE, export, export_arrays
from jddp.ground.errors import file_errors, report
from jddp.ground.typing import JsonObject
from jddp.trainer.runs.opened import Saved, config_in, model_in
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
            export(checkpoint, folder / WHOLE)
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
