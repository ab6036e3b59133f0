"""The forms in which libraries have the models of the zoo: names of tensors, and fixed fields."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jddp.errors import ConfigError
from jddp.typing import JsonObject
from jddp.workbench.state_dicts import hub_configs, tables
from jddp.workbench.state_dicts.entries import Entry, Tensors
from jddp.zoo.models import GPT, Module, ResNet, ViT

# What stands before the names of a model that is part of another, such as DDP.
WRAPPERS = r"^(module\.|model\.|_orig_mod\.)+"


class Scheme(NamedTuple):
    """A library's form of a model.

    Attributes:
      table: Function of the model that returns its entries.
      fields: Fields of the zoo's model as the library has them; no tensor shows these.
      renames: Patterns of names, each with its replacement, after which names of other versions,
        and of the model's body alone, equal those of the table.
      ignored: Pattern of tensors that hold no weights.
      tied: Names of tensors that repeat another, each with the name of that.
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
        "torchvision": Scheme(tables.torchvision_resnet),
        "huggingface": Scheme(
            tables.huggingface_resnet,
            renames=((r"^resnet\.", ""),),
            hub_config=hub_configs.resnet_config,
        ),
    },
    ViT: {
        "torchvision": Scheme(
            tables.torchvision_vit,
            fields=(("pooling", "token"), ("gelu", "exact"), ("norm_epsilon", 1e-6)),
            renames=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
        ),
        "huggingface": Scheme(
            tables.huggingface_vit,
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
            hub_config=hub_configs.vit_config,
        ),
    },
    GPT: {
        "huggingface": Scheme(
            tables.huggingface_gpt,
            fields=(("gelu", "tanh"), ("norm_epsilon", 1e-5)),
            renames=((r"^transformer\.", ""),),
            ignored=r"\.attn\.(masked_)?bias$",  # causal masks
            tied=(("lm_head.weight", "wte.weight"),),
            hub_config=hub_configs.gpt_config,
        ),
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
            f"{library!r} has no names for a {type(model).__name__}. There are those of {known}."
        )
    return SCHEMES[type(model)][library]


def unlike(model: Module, library: str) -> str:
    """Fields in which a model differs from the library's, as "gelu='tanh' (there 'exact')"."""
    fields = [(x, getattr(model, x), there) for x, there in scheme_of(model, library).fields]
    return ", ".join(f"{x}={own!r} (there {there!r})" for x, own, there in fields if own != there)
