"""State dicts of published PyTorch models, for the models of the zoo, and back.

    variables = from_state_dict(resnet18(), tensors)     # NumPy arrays, by torchvision's names
    tensors = to_state_dict(resnet18(), variables, "torchvision")

The library is found by the names. They may have the prefix of a model inside another ("module." of
DDP, "_orig_mod." of a compiled model), or belong to the model's body alone. PyTorch itself is not
needed.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jddp.checkpoint.weights import is_run_folder, read_weights
from jddp.engine.initial_state import Misfit
from jddp.engine.state import by_path
from jddp.ground.errors import ConfigError
from jddp.ground.typing import JsonObject, PyTree
from jddp.workbench import library_names
from jddp.workbench.library_names import Entry, Tensors, stack_blocks, unstack_blocks
from jddp.zoo.models import GPT, Module, ResNet, ViT
from jddp.zoo.models.transformer import Transformer

# Prefixes of the names of a model that is part of another, such as DDP.
WRAPPERS = r"^(module\.|model\.|_orig_mod\.)+"


class Scheme(NamedTuple):
    """A library's form of a model.

    Attributes:
      table: Function of the model that returns its entries.
      fields: Fields of the zoo's model as the library has them; no tensor shows these.
      renames: Patterns of names, each with its replacement, after which names of other versions,
        and of the model's body alone, equal the names in the table.
      ignored: Pattern of tensors that hold no weights.
      tied: Names of tensors that repeat another tensor, each with the name of the other.
      hub_config: Function of the model and its tensors that returns the `config.json` from which
        the library makes the model; None if it reads none.
    """

    table: Callable[[Any], Iterator[Entry]]
    fields: tuple[tuple[str, object], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: str = r"\.num_batches_tracked$"
    tied: tuple[tuple[str, str], ...] = ()
    hub_config: Callable[[Any, Tensors], JsonObject] | None = None

    def comparable(self, name: str) -> str:
        """A name in the form in which names are compared."""
        for pattern, replacement in ((WRAPPERS, ""), *self.renames):
            name = re.sub(pattern, replacement, name)
        return name

    def num_known(self, model: Module, names: Iterable[str]) -> int:
        """How many of the names are in the table."""
        own = {self.comparable(name) for entry in self.table(model) for name in entry.names}
        return len(own & {self.comparable(name) for name in names})


SCHEMES: Mapping[type[Module], Mapping[str, Scheme]] = {
    ResNet: {
        "torchvision": Scheme(library_names.torchvision_resnet),
        "huggingface": Scheme(
            library_names.huggingface_resnet,
            renames=((r"^resnet\.", ""),),
            hub_config=library_names.resnet_config,
        ),
    },
    ViT: {
        "torchvision": Scheme(
            library_names.torchvision_vit,
            fields=(("pooling", "token"), ("gelu", "exact"), ("norm_epsilon", 1e-6)),
            renames=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
        ),
        "huggingface": Scheme(
            library_names.huggingface_vit,
            fields=(("pooling", "token"), ("gelu", "exact"), ("norm_epsilon", 1e-12)),
            renames=(
                (r"^vit\.", ""),
                # Modules of transformers 5 have other names than its files.
                (r"^layers\.", "encoder.layer."),
                (r"\.attention\.q_proj\.", ".attention.attention.query."),
                (r"\.attention\.k_proj\.", ".attention.attention.key."),
                (r"\.attention\.v_proj\.", ".attention.attention.value."),
                (r"\.attention\.o_proj\.", ".attention.output.dense."),
                (r"\.mlp\.fc1\.", ".intermediate.dense."),
                (r"\.mlp\.fc2\.", ".output.dense."),
            ),
            hub_config=library_names.vit_config,
        ),
    },
    GPT: {
        "huggingface": Scheme(
            library_names.huggingface_gpt,
            fields=(("gelu", "tanh"), ("norm_epsilon", 1e-5)),
            renames=((r"^transformer\.", ""),),
            ignored=r"\.attn\.(masked_)?bias$",  # causal masks
            tied=(("lm_head.weight", "wte.weight"),),
            hub_config=library_names.gpt_config,
        )
    },
}


def libraries(model: Module) -> list[str]:
    """The libraries whose names for the model are known."""
    return [*SCHEMES.get(type(model), {})]


def library_of(model: Module, names: Iterable[str]) -> str | None:
    """The library that gives the model most of these names; None if none gives any."""
    given = [*names]
    schemes = SCHEMES.get(type(model), {})
    known = {library: scheme.num_known(model, given) for library, scheme in schemes.items()}
    best = max(known, key=lambda library: known[library], default=None)
    return best if best and known[best] else None


def scheme_of(model: Module, library: str) -> Scheme:
    """The form in which a library has a model.

    Raises:
      ConfigError: If it has none.
    """
    if library not in libraries(model):
        known = " or ".join(libraries(model)) or "no library: leave the names out"
        raise ConfigError(
            f"{library!r} has no names for a {type(model).__name__}. It has names of {known}."
        )
    return SCHEMES[type(model)][library]


def unlike(model: Module, library: str) -> str:
    """Fields in which a model differs from the library's, as "gelu='tanh' (there 'exact')"."""
    fields = [(x, getattr(model, x), there) for x, there in scheme_of(model, library).fields]
    return ", ".join(f"{x}={own!r} (there {there!r})" for x, own, there in fields if own != there)


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
      partial: Whether tensors may be missing or left over, and the model may compute something
        else than the library's model.

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
    """Whether a tensor holds no weights, or repeats another tensor."""
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
      OtherModel: If the weights belong to a library, and its model is another.
    """
    if is_run_folder(path) or not libraries(model):
        return path, ""
    tensors = {name.replace("/", "."): x for name, x in by_path(read_weights(path)).items()}
    library = library_of(model, tensors)
    if library is None:
        return path, ""
    return from_state_dict(model, tensors, partial=partial), library
