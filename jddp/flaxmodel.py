"""Linen and NNX modules in one functional form: parameters, other state, and a run of the loss.

    model = functional(module)
    params, model_state = model.init(loss_fn, key, batch)
    outputs, model_state = model.train(loss_fn, params, model_state, batch, key)

Both are nested dicts of plain arrays, so that nothing of a module is on the hot path. A loss is
`loss_fn(model, batch, train)`; what it is handed as `model` is a bound Linen module, or an NNX
module in train or eval mode.
"""

import abc
import functools
import inspect
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jddp.batch_norm import MODES, Mode, Path, Sync, settle, sync_nnx, synced_linen
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


def functional(
    model: Any,
    *,
    batch_norm: str = "sync",
    sync: Sync | None = None,
    per_replica: Sequence[str] = (),
) -> FlaxModel:
    """Returns the functional form of a Linen or NNX module; `FlaxModel` says what the options mean.

    Raises:
      ConfigError: If `model` is neither, or `batch_norm` is unknown.
    """
    if batch_norm not in MODES:
        raise ConfigError(f"batch_norm {batch_norm!r} is unknown. Choose one of {list(MODES)}.")
    form: FlaxModel
    if isinstance(model, nn.Module):
        form = _LinenModel(model)
    elif isinstance(model, nnx.Module):
        form = _NnxModel(model)
    else:
        what = f"the class {model.__name__}" if inspect.isclass(model) else type(model).__name__
        raise ConfigError(
            f"model is {what}. Give an instance of flax.linen.Module or flax.nnx.Module; "
            "docs/models.md shows how to make one of a function, or of another library's model."
        )
    form.batch_norm, form.sync = cast(Mode, batch_norm), sync or Sync("data")
    form.per_replica = tuple(per_replica)
    form.name = type(model).__name__
    return form


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


def _call(loss_fn: LossFn, model: Any, batch: PyTree, *, train: bool) -> Any:
    if not takes_train(loss_fn):
        return loss_fn(model, batch)
    by_name = "train" in inspect.signature(loss_fn).parameters
    return loss_fn(model, batch, train=train) if by_name else loss_fn(model, batch, train)


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a stream of random numbers."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


class _LinenModel(FlaxModel):
    """A Linen module; its variables are made by running the loss under `nn.init`."""

    # Collections that are there for whoever looks into a model, and that nothing writes here.
    _OFF = ("perturbations",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def init(self, loss_fn: LossFn, key: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        run = nn.init(
            lambda model, batch: _call(loss_fn, model, batch, train=True),
            self._module,
            mutable=nn.DenyList(self._OFF),
        )
        # A model that was written for other meshes names their axes. Where JAX sees no mesh, Flax
        # leaves the values alone; `lax.psum` and the like know the replicas all the same.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            variables = run(self._streams(key), batch)
        params, model_state = self.split(variables)
        return params, model_state or {}

    def train(
        self, loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Any, PyTree]:
        run = nn.apply(
            lambda model, batch: _call(loss_fn, model, batch, train=True),
            self._module,
            mutable=nn.DenyList(("params", *self._OFF)),
        )
        synced: set[tuple[Any, ...]] = set()
        with (
            synced_linen(self.sync) if self.batch_norm == "sync" else nullcontext(synced) as synced
        ):
            variables = {"params": params, **model_state}
            outputs, written = run(variables, batch, rngs=self._streams(key))
        new = {name: written.get(name, old) for name, old in model_state.items()}

        def is_synced(path: tuple[Any, ...]) -> bool:
            collection, *layer, _ = (entry.key for entry in path)
            return collection == "batch_stats" and tuple(layer) in synced

        return outputs, settle(
            model_state,
            new,
            mode=self.batch_norm,
            synced=is_synced,
            own=self.keeps_own,
            sync=self.sync,
        )

    def evaluate(
        self, loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> Any:
        # Flax refuses a model that would train its statistics or drop units. A loss that cannot be
        # told to evaluate may write no state and has no keys; and none has one for "dropout", which
        # a model that asks `has_rng("dropout")` takes for training.
        is_told = takes_train(loss_fn)
        streams = {"params": stream(key, "params")} if is_told else {}
        kept = ("batch_stats",) if is_told else tuple(model_state)
        run = nn.apply(
            lambda model, batch: _call(loss_fn, model, batch, train=False),
            self._module,
            # What is written is forgotten, such as a cache.
            mutable=nn.DenyList(("params", *kept)),
        )
        try:
            outputs, _ = run({"params": params, **model_state}, batch, rngs=streams)
            return outputs
        except (flax.errors.InvalidRngError, flax.errors.ModifyScopeVariableError) as error:
            raise UsageError(
                "This model trains while it is evaluated. Write loss_fn(model, batch, train) and "
                "hand train on to the model, or give eval_fn=."
            ) from error

    def split(self, values: PyTree) -> tuple[PyTree, PyTree | None]:
        values = _without_axes(values)
        if _is_saved(values):
            return values["params"], values.get("model_state")
        if not (isinstance(values, Mapping) and isinstance(values.get("params"), Mapping)):
            return values, None
        off = ("params", *self._OFF)
        rest = {k: v for k, v in values.items() if k not in off and not _is_sown(v)}
        return values["params"], rest or None

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        return {"params": params, **model_state}

    def kinds_at(self, path: Path) -> set[str]:
        return {path[0].key}

    def _streams(self, key: jax.Array) -> dict[str, jax.Array]:
        # Flax serves a stream that is not listed from "params"; "dropout" is listed because models
        # ask `has_rng("dropout")`.
        return {name: stream(key, name) for name in ("params", "dropout")}


def _is_sown(collection: PyTree) -> bool:
    """Whether `sow` has made it: a tuple that grows with every run, and no state."""
    leaves = jax.tree.leaves(collection, is_leaf=lambda x: isinstance(x, tuple))
    return any(isinstance(leaf, tuple) for leaf in leaves)


def _is_saved(values: PyTree) -> bool:
    """Whether these are fields of a state, as a checkpoint or an export of one has them."""
    fields = {"params", "model_state", "ema_params"}
    return isinstance(values, Mapping) and {"params"} <= values.keys() <= fields


def _without_axes(variables: PyTree) -> PyTree:
    """Takes the values out of the boxes in which Flax keeps the names of mesh axes."""

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.Partitioned)

    boxes = filter(is_box, jax.tree.leaves(variables, is_leaf=is_box))
    _tell_axes(box.names for box in boxes)
    return jax.tree.map(lambda x: x.value if is_box(x) else x, variables, is_leaf=is_box)


def _tell_axes(names: Iterable[Any]) -> None:
    axes = {axis for axes in names if axes for axis in jax.tree.leaves(tuple(axes))}
    if axes:
        log.warning(
            "The model names the mesh axes %s for its parameters. Here each device holds them all.",
            ", ".join(sorted(map(str, axes))),
        )


_REST = jax.tree_util.DictKey("rest")


class _NnxModel(FlaxModel):
    """An NNX module, split once; its own keys are the base keys of its streams."""

    def __init__(self, module: nnx.Module) -> None:
        self._graph, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
        kept = nnx.to_flat_state(parts[-1])
        self._kinds = {path: {c.__name__ for c in type(x).__mro__} for path, x in kept}
        _tell_axes(x.get_metadata().get("out_sharding") for _, x in nnx.to_flat_state(parts[0]))
        params, rngs, rest = map(nnx.to_pure_dict, parts)
        self._own = {"rngs": rngs, "rest": rest}
        self.values = params, self._own

    def init(self, loss_fn: LossFn, key: jax.Array, batch: PyTree) -> tuple[PyTree, PyTree]:
        raise AssertionError("an NNX module has its values")

    def train(
        self, loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Any, PyTree]:
        rngs = jax.tree.map(lambda leaf: _fold(leaf, key), model_state["rngs"])
        module = nnx.merge(self._graph, params, rngs, model_state["rest"])
        module.train()
        synced = sync_nnx(module, self.sync) if self.batch_norm == "sync" else set()
        outputs = _call(loss_fn, module, batch, train=True)
        parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
        _, own, _, left = parts
        if _paths(nnx.to_pure_dict(own)) != _paths(params):
            raise ConfigError(
                "The module has other parameters after the loss than before: they are made or "
                "removed while it runs. Make them in __init__, or run the module once before it is "
                "wrapped."
            )
        rest = _like(model_state["rest"], nnx.to_pure_dict(left))

        def is_synced(path: tuple[Any, ...]) -> bool:
            return tuple(entry.key for entry in path[:-1]) in synced

        rest = settle(
            model_state["rest"],
            rest,
            mode=self.batch_norm,
            synced=is_synced,
            own=lambda path: self.keeps_own((_REST, *path)),
            sync=self.sync,
        )
        return outputs, {"rngs": model_state["rngs"], "rest": rest}

    def evaluate(
        self, loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> Any:
        rngs = jax.tree.map(lambda leaf: _fold(leaf, key), model_state["rngs"])
        module = self.rebuild(params, {"rngs": rngs, "rest": model_state["rest"]})
        return _call(loss_fn, module, batch, train=False)

    def split(self, values: PyTree) -> tuple[PyTree, PyTree]:
        if _is_saved(values) and "params" not in cast(Any, self.values)[0]:
            rest = values.get("model_state", {}).get("rest", self._own["rest"])
            return values["params"], {**self._own, "rest": rest}
        if not isinstance(values, nnx.State):
            return values, self._own
        params, rngs, rest = map(
            nnx.to_pure_dict, nnx.split_state(values, nnx.Param, nnx.RngState, ...)
        )
        return params, {"rngs": rngs or self._own["rngs"], "rest": rest or self._own["rest"]}

    def kinds_at(self, path: Path) -> set[str]:
        return self._kinds.get(tuple(entry.key for entry in path[1:]), set())

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        module = nnx.merge(self._graph, params, model_state["rngs"], model_state["rest"])
        module.eval()
        return module


def _fold(leaf: jax.Array, key: jax.Array) -> jax.Array:
    """Folds a stream's base keys with the bits of this step's and replica's key."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    fold = jax.random.fold_in
    for _ in range(leaf.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    for word in jax.random.key_data(key).ravel():
        leaf = fold(leaf, word)
    return leaf


def _paths(tree: PyTree) -> list[Path]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _like(old: PyTree, new: PyTree) -> PyTree:
    """The part of `new` that has a place in `old`: sown values would change the state's form."""
    if not isinstance(old, dict):
        return new
    if gone := sorted(map(str, old.keys() - new.keys())):
        raise ConfigError(
            f"The module has lost its {gone[0]!r} in the loss. Let it keep its variables."
        )
    return {name: _like(value, new[name]) for name, value in old.items()}
