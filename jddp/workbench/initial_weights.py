"""The weights that `model.init_from` names: those of a library of PyTorch get the zoo's paths."""

from pathlib import Path

from jddp.checkpoint.weights import is_run_folder, read_weights
from jddp.engine.state import by_path
from jddp.typing import PyTree
from jddp.workbench.state_dicts import from_state_dict
from jddp.workbench.state_dicts.schemes import libraries, library_of
from jddp.zoo.models import Module


def initial_weights(path: Path, model: Module, *, partial: bool) -> tuple[PyTree, str]:
    """Finds out by whose names a file has its weights.

    Args:
      path: File, folder of the Hugging Face Hub, or run.
      model: The model that starts from it.
      partial: Whether weights may be missing or left over.

    Returns:
      Flax's variables and the library by whose names they were given; the path itself and "" if the
      names are of none.

    Raises:
      OtherModel: If the weights are those of a library, and its model is another.
    """
    if is_run_folder(path) or not libraries(model):
        return path, ""
    tensors = {name.replace("/", "."): x for name, x in by_path(read_weights(path)).items()}
    library = library_of(model, tensors)
    if library is None:
        return path, ""
    return from_state_dict(model, tensors, partial=partial), library
