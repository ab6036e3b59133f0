"""What a step needs to know of a model, and how a loss is called; Linen and NNX each fill it in."""

import abc
import functools
import inspect
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jddp.batch_norm import Mode, Path, Sync
from jddp.errors import ConfigError, UsageError

PyTree = Any
LossFn = Callable[..., Any]
log = logging.getLogger("jddp")


class FlaxModel(abc.ABC):
    """What a step needs to know of a model.

    Attributes:
      name: Of the module's class.
      values: Parameters and other state that the module already has (NNX), or None (Linen).
      batch_norm: How batch statistics agree over the replicas; one of `batch_norm.MODES`.
      sync: Over which replicas they are taken under "sync".
      per_replica: Kinds of other state of which each replica keeps its own: collections (Linen),
        or classes of variables (NNX), by name.
    """

    name: str
    values: tuple[PyTree, PyTree] | None = None
    batch_norm: Mode
    sync: Sync
    per_replica: tuple[str, ...]

    def keeps_own(self, path: Path) -> bool:
        """Whether each replica keeps its own of what stands there in the other state."""
        return self.batch_norm == "local" or not self.kinds_at(path).isdisjoint(self.per_replica)

    def check_kinds(self, model_state: PyTree) -> None:
        """Refuses a `per_replica` that names nothing.

        Raises:
          ConfigError: If no leaf is of such a kind.
        """
        leaves = jax.tree_util.tree_leaves_with_path(model_state)
        there = set[str]().union(*(self.kinds_at(path) for path, _ in leaves))
        if unknown := sorted(set(self.per_replica) - there):
            raise ConfigError(
                f"per_replica names {unknown[0]!r}, and the model keeps "
                f"{', '.join(sorted(there)) or 'nothing'} beside its parameters."
            )

    @abc.abstractmethod
    def kinds_at(self, path: Path) -> set[str]:
        """The names by which what stands there in the other state may be called in a whole."""

    @abc.abstractmethod
    def init(self, loss_fn: LossFn, key: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Makes parameters and other state, by running the loss once."""

    @abc.abstractmethod
    def train(
        self, loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Any, PyTree]:
        """Runs the loss on one replica's share; returns what it returns, and the new state."""

    @abc.abstractmethod
    def evaluate(
        self, loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> Any:
        """Runs the loss for evaluation on one replica's share; returns what it returns."""

    @abc.abstractmethod
    def split(self, values: PyTree) -> tuple[PyTree, PyTree | None]:
        """Splits what a user gives as `init(params=...)` into parameters and other state."""

    @abc.abstractmethod
    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Returns what the user knows: Linen variables, or an NNX module in eval mode."""


def takes_train(loss_fn: LossFn) -> bool:
    """Whether `loss_fn` is `loss_fn(model, batch, train)`, told by its signature."""
    parameters = inspect.signature(loss_fn).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (
        any(p.kind is p.VAR_POSITIONAL for p in parameters)
        or any(p.name == "train" for p in parameters)
        or sum(p.default is p.empty for p in positional) > 2
    )


def takes_constants(loss_fn: LossFn) -> bool:
    """Whether the loss has an argument `constants`."""
    return "constants" in inspect.signature(loss_fn).parameters


def name_constants(loss_fn: LossFn, constants: PyTree) -> LossFn:
    """The loss, handed `constants` if it names them.

    Raises:
      UsageError: If it needs them, and there are none.
    """
    parameter = inspect.signature(loss_fn).parameters.get("constants")
    if parameter is None or (constants is None and parameter.default is not parameter.empty):
        return loss_fn
    if constants is None:
        raise UsageError(
            "loss_fn names `constants`, and was given none. Pass constants=, a tree of arrays, to "
            "init, step and evaluate; or take ddp.given(constants)."
        )
    return functools.partial(loss_fn, constants=constants)


def call_loss(loss_fn: LossFn, model: Any, batch: PyTree, *, train: bool) -> Any:
    """Calls a loss, telling it whether this is training if it asks."""
    if not takes_train(loss_fn):
        return loss_fn(model, batch)
    by_name = "train" in inspect.signature(loss_fn).parameters
    return loss_fn(model, batch, train=train) if by_name else loss_fn(model, batch, train)


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a stream of random numbers."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def is_saved(values: PyTree) -> bool:
    """Whether these are fields of a state, as a checkpoint or an export of one has them."""
    fields = {"params", "model_state", "ema_params"}
    return isinstance(values, Mapping) and {"params"} <= values.keys() <= fields


def tell_axes(names: Iterable[Any]) -> None:
    """Gives notice of the mesh axes that a model names for its parameters, if it names any."""
    axes = {axis for axes in names if axes for axis in jax.tree.leaves(tuple(axes))}
    if axes:
        log.warning(
            "The model names the mesh axes %s for its parameters. Here each device holds them all.",
            ", ".join(sorted(map(str, axes))),
        )
