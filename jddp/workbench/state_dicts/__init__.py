"""State dicts of published PyTorch models, for the models of the zoo, and back.

    variables = from_state_dict(resnet18(), tensors)     # NumPy arrays, by torchvision's names
    tensors = to_state_dict(resnet18(), variables, "torchvision")

The library is found by the names, which may be those of a model inside another ("module." of DDP,
"_orig_mod." of a compiled model), or of the model's body alone. PyTorch itself is not needed.
"""

import logging
import re
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jddp.checkpoint.weights import Misfit
from jddp.errors import ConfigError
from jddp.typing import JsonObject
from jddp.workbench.state_dicts.entries import Tensors, stack_blocks, unstack_blocks
from jddp.workbench.state_dicts.schemes import Scheme, libraries, library_of, scheme_of, unlike
from jddp.zoo.models import Module
from jddp.zoo.models.transformer import Transformer


class OtherModel(Misfit):
    """A state dict that does not fit a model.

    Args:
      where: The first of the tensors that are missing, or left over, and the fields that differ.
    """

    def __init__(self, where: str) -> None:
        ConfigError.__init__(
            self,
            f"The state dict does not fit the model at {where}. With partial=True the model keeps "
            "its own there.",
        )
        self.where = where


def from_state_dict(model: Module, tensors: Tensors, *, partial: bool = False) -> JsonObject:
    """Reads the variables of a model of the zoo from a state dict.

    Args:
      model: A ResNet, ViT or GPT of the zoo.
      tensors: NumPy arrays by the names of torchvision or Hugging Face.
      partial: Whether tensors may be missing or left over, and the model may compute otherwise than
        the library's.

    Returns:
      Flax's variables, floating values in float32. If it is partial, tensors that are left over are
      among the "params" by their names.

    Raises:
      ConfigError: If the names are of no known library.
      OtherModel: If the model differs from the library's, and it is not `partial`.
    """
    library = library_of(model, tensors)
    if library is None:
        known = " or ".join(libraries(model)) or "no library that is known"
        raise ConfigError(
            f"the names of the tensors are none that a {type(model).__name__} has in {known}."
        )
    scheme = scheme_of(model, library)
    arrays, missing, extra = _sorted_out(scheme, model, tensors)
    faults = _faults(library, unlike(model, library), missing, extra)
    if faults and not partial:
        raise OtherModel(faults)
    if faults:
        logging.getLogger("jddp").warning("The state dict does not fit the model at %s.", faults)
    if isinstance(model, Transformer) and model.scan_layers:
        arrays = stack_blocks(arrays, model.num_layers)
    variables = unflatten_dict(arrays, sep="/")
    variables.setdefault("params", {}).update({name: tensors[name] for name in extra})
    return variables


def _sorted_out(
    scheme: Scheme, model: Module, tensors: Tensors
) -> tuple[Tensors, list[str], list[str]]:
    """The arrays by their paths, and the names of tensors that are missing and left over."""
    left = {scheme.comparable(name): name for name in tensors}
    arrays: Tensors = {}
    missing: list[str] = []
    for entry in scheme.table(model):
        names = [left.pop(scheme.comparable(name), None) for name in entry.names]
        missing += [x for x, name in zip(entry.names, names, strict=True) if name is None]
        if None not in names:
            arrays[entry.path] = entry.read([_single(tensors[name]) for name in names if name])
    extra = [x for name, x in left.items() if not _is_known(scheme, name, tensors)]
    return arrays, missing, extra


def _single(x: np.ndarray) -> np.ndarray:
    """A tensor as the zoo's models have their parameters."""
    return x.astype("float32", copy=False) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _is_known(scheme: Scheme, name: str, tensors: Tensors) -> bool:
    """Whether a tensor holds no weights, or those of another tensor."""
    if re.search(scheme.ignored, name):
        return True
    by_name = {scheme.comparable(x): tensor for x, tensor in tensors.items()}
    tied = by_name.get(dict(scheme.tied).get(name, ""))
    return tied is not None and np.array_equal(by_name[name], tied)


def _faults(library: str, fields: str, missing: Sequence[str], extra: Sequence[str]) -> str:
    """The places where a state dict differs from the model; "" if there are none."""
    faults = [_listed("missing", missing), _listed("not in the model", extra)]
    faults += [f"the fields {fields}"] if fields else []
    text = ", ".join(filter(None, faults))
    return text and f"{text}, by the names of {library}"


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} ({what})" if names else ""


def to_state_dict(model: Module, variables: Mapping[str, object], library: str) -> Tensors:
    """The state dict of a model of the zoo.

    Args:
      model: A ResNet, ViT or GPT of the zoo.
      variables: Flax's variables of the model.
      library: The library whose names the tensors get.

    Raises:
      ConfigError: If the library has no such model, or not with these variables.
    """
    scheme = scheme_of(model, library)
    arrays = flatten_dict(variables, sep="/")
    if isinstance(model, Transformer) and model.scan_layers:
        arrays = unstack_blocks(arrays)
    tensors: Tensors = {}
    for entry in scheme.table(model):
        if entry.path not in arrays:
            raise ConfigError(
                f"the model has no {entry.path}, which is {entry.names[0]} in {library}'s "
                f"{type(model).__name__}. Leave the names out."
            )
        parts = entry.write(np.asarray(arrays[entry.path]))
        tensors |= zip(entry.names, parts, strict=True)
    return tensors
