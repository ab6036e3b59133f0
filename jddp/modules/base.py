"""The interface of a model to a step, which Linen and NNX implement; calls of losses and models.

Parameters that are not trained are kept with the other state of a model, in its collection
"params". So code that works on `state.params` leaves them alone: they are not differentiated, sent,
clipped, averaged or updated, and have no optimizer state.

Models that are written to be sharded name mesh axes in the boxes of their parameters
(`nn.with_partitioning`) and in constraints on arrays (`lax.with_sharding_constraint`, which Flax
also calls for its boxes and logical names). In a replica's program every array is whole, and JAX
refuses any constraint on it. JAX has no interceptor for constraints. So the function
`jax.lax.with_sharding_constraint` is replaced once, when the first model is run. The new function
calls the old one, except in a thread and context where constraints are left out.

`call_model` passes a model the arrays of a batch that its `__call__` takes: inputs, and others by
name. Losses by name call models in this way, and so do predictions that name no function.
"""

import abc
import contextlib
import functools
import inspect
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NotRequired, TypedDict, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jddp.ground.errors import ConfigError, UsageError
from jddp.ground.names import match_paths
from jddp.ground.typing import Batch, LossFn, ModelState, Params, Path, PyTree, Shaped, in_mebibytes
from jddp.modules.batch_norm import Sync
from jddp.modules.rows import LEFT_OUT, transformed

log = logging.getLogger("jddp")

# The specs of constraints that are left out; None if none are left out.
_LEFT_OUT: ContextVar[list[object] | None] = ContextVar("left_out", default=None)


class MeshAxes:
    """The axes that one model names; each is reported once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, named: Iterable[object]) -> None:
        """Warns of axes that have not been reported, in specs or tuples of names.

        While constraints are left out, it waits until their end, and adds the axes of these.
        """
        if (left_out := _LEFT_OUT.get()) is not None:
            left_out += named
            return
        specs = [spec for spec in named if isinstance(spec, tuple | list | jax.P)]
        axes = jax.tree.leaves([tuple(spec) for spec in specs])
        new = {axis for axis in axes if isinstance(axis, str)} - self._reported
        self._reported |= new
        if new:
            log.warning(
                "The model names the mesh axes %s. Here each device holds all parameters, and its "
                "own rows whole.",
                ", ".join(sorted(new)),
            )

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leaves constraints on arrays out while open, and reports their axes at the end."""
        _replace_constraints()
        specs: list[object] = []
        token = _LEFT_OUT.set(specs)
        try:
            yield
        finally:
            _LEFT_OUT.reset(token)
        self.report(specs)


@functools.cache
def _replace_constraints() -> None:
    for module, name in ((jax.lax, "with_sharding_constraint"), (jax.sharding, "reshard")):
        setattr(module, name, _left_out_where_asked(getattr(module, name)))


def _left_out_where_asked(constrain: Callable[..., PyTree]) -> Callable[..., PyTree]:
    @functools.wraps(constrain)
    def constrain_or_not(x: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        left_out = _LEFT_OUT.get()
        if left_out is None:
            return constrain(x, *args, **kwargs)
        given = jax.tree.leaves((args, kwargs), is_leaf=lambda spec: isinstance(spec, jax.P))
        left_out += [getattr(sharding, "spec", sharding) for sharding in given]
        return x

    return constrain_or_not


COLLECTION = "params"
Frozen = Sequence[str] | Callable[[str], bool]


def is_frozen(path: Path) -> bool:
    """Whether a leaf of the other state is a parameter that is not trained."""
    return path[0] == jax.tree_util.DictKey(COLLECTION)


def freeze(params: Params, model_state: ModelState, frozen: Frozen) -> tuple[Params, ModelState]:
    """Moves parameters that are not trained into the other state.

    Args:
      params: All parameters.
      model_state: Other state.
      frozen: Regular expressions, each for whole paths such as "backbone/Dense_0/kernel"; or a
        function of such a path. An empty list freezes nothing.

    Raises:
      ConfigError: If an expression matches no parameter (the message has the nearest ones); or if
        all parameters are frozen.
    """
    if not (callable(frozen) or frozen):
        return params, model_state
    leaves = flatten_dict(params, keep_empty_nodes=True)
    names = {"/".join(map(str, path)): path for path in leaves}
    is_chosen = (
        frozen if callable(frozen) else match_paths(frozen, names, key="frozen").__contains__
    )
    still = {path: leaves[path] for name, path in names.items() if is_chosen(name)}
    trained = {path: x for path, x in leaves.items() if path not in still}
    if not (still and trained):
        raise ConfigError(f"frozen: it matches {'all parameters' if still else 'none'}.")
    return unflatten_dict(trained), {**model_state, COLLECTION: unflatten_dict(still)}


def thaw(params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
    """Returns all parameters, and the other state without parameters that are not trained."""
    if COLLECTION not in model_state:
        return params, model_state
    rest = {name: x for name, x in model_state.items() if name != COLLECTION}
    both = [flatten_dict(tree, keep_empty_nodes=True) for tree in (model_state[COLLECTION], params)]
    return unflatten_dict(both[0] | both[1]), rest


STATISTICS = {"batch_stats", "BatchStat"}  # Kinds of state, in Linen and in NNX.
OVERWRITTEN = "_overwrite_with_gradient"  # The kind of the scales of fp8 layers.

LOSS = "loss"  # The scope of the equations of a loss.
TILED = "tiled_cross_entropy"  # Scope of a loss that is computed in tiles.


class FlaxModel(abc.ABC):
    """The interface of a model to a step.

    Attributes:
      name: Name of the module's class.
      values: Parameters and other state that the module already has (NNX), or None (Linen).
      batch_norm: Synchronization of batch statistics: "sync", "broadcast" or "local".
      sync: Replicas whose statistics are taken together under "sync", and rules for other state.
      per_replica: Names of other state that each replica keeps for itself: collections (Linen), or
        classes of variables (NNX).
      compute_dtype: Dtype of the arithmetic, as `jddp.modules.precision.Casts` takes it.
      frozen: Parameters that are not trained, as `jddp.modules.base.freeze` takes them.
      axes: Mesh axes that the model names.
    """

    name: str
    values: tuple[Params, ModelState] | None = None
    batch_norm: str
    sync: Sync
    per_replica: tuple[str, ...]
    compute_dtype: np.dtype | None
    frozen: Frozen
    axes: MeshAxes

    def whole(self, params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
        """Returns all parameters, trained or not, and the other state."""
        return thaw(params, model_state)

    def notes(self, model_state: ModelState) -> list[str]:
        """Returns notes on parameters that are in no plan."""
        leaves = jax.tree.leaves(model_state.get(COLLECTION, {}))
        size = in_mebibytes(sum(x.size * x.dtype.itemsize for x in leaves))
        return [f"{len(leaves)} frozen leaves, {size} MiB: neither trained nor sent"] * bool(leaves)

    def keeps_own(self, path: Path, x: Shaped) -> bool:
        """Whether each replica keeps its own `x`, found at `path` in the other state."""
        if is_frozen(path):
            return False
        kinds = self.kinds_at(path)
        if not set(self.per_replica).isdisjoint(kinds):
            return jnp.issubdtype(x.dtype, jnp.number)
        is_own = self.batch_norm == "local" and self.sync.rule(kinds) is None
        return is_own and jnp.issubdtype(x.dtype, jnp.inexact)

    def is_statistic(self, path: Path) -> bool:
        """Whether the leaf at `path` is a statistic of a batch norm."""
        return not is_frozen(path) and not STATISTICS.isdisjoint(self.kinds_at(path))

    def is_global_statistic(self, path: Path, x: Shaped) -> bool:
        """Whether `x`, at `path`, is a running statistic of the global batch."""
        is_global = self.batch_norm == "sync" and self.is_statistic(path)
        is_global = is_global and self.sync.rule(self.kinds_at(path)) is None
        return is_global and jnp.issubdtype(x.dtype, jnp.number) and not self.keeps_own(path, x)

    def check_kinds(self, model_state: ModelState) -> None:
        """Refuses options that name nothing, and state that a gradient is to overwrite.

        Raises:
          ConfigError: If no leaf is of a kind that `state` names; or if there are scales of fp8
            layers.
        """
        leaves = jax.tree_util.tree_leaves_with_path(model_state)
        there = set[str]().union(
            *(self.kinds_at(path) for path, _ in leaves if not is_frozen(path))
        )
        if OVERWRITTEN in there:
            raise ConfigError(
                f"The model keeps {OVERWRITTEN!r}: its fp8 layers expect that gradients replace "
                "their scales, which a step of jddp does not do. Leave fp8 out, and compute in "
                "half precision with precision='bfloat16'."
            )
        declared = {*self.per_replica, *dict(self.sync.rules)}
        unknown = sorted(declared - there)
        if unknown:
            raise ConfigError(
                f"state names {unknown[0]!r}, and the model keeps "
                f"{', '.join(sorted(there)) or 'nothing'} as state besides its parameters."
            )

    @abc.abstractmethod
    def kinds_at(self, path: Path) -> Sequence[str]:
        """Names by which a leaf of the other state may be declared, the narrowest first."""

    def call(self, loss_fn: LossFn, model: object, batch: Batch, *, train: bool) -> PyTree:
        """Calls a loss with a model in Flax's own form, without constraints on its arrays."""
        with self.axes.left_out():
            return call_loss(loss_fn, model, transformed(batch), train=train)

    def init(self, loss_fn: LossFn, key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        """Returns the `values`; a model without them makes them, by running the loss once."""
        return cast(tuple[Params, ModelState], self.values)

    @abc.abstractmethod
    def train(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> tuple[PyTree, ModelState]:
        """Runs the loss on one replica's rows; returns its outputs, and the new state."""

    @abc.abstractmethod
    def evaluate(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> PyTree:
        """Runs the loss for evaluation on one replica's rows; returns its outputs."""

    @abc.abstractmethod
    def split(self, values: PyTree) -> tuple[Params, ModelState | None]:
        """Splits the values of `init(params=...)` into parameters and other state."""

    @abc.abstractmethod
    def rebuild(self, params: Params, model_state: ModelState) -> Any:
        """Returns the model in Flax's own form: Linen variables, or an NNX module in eval mode."""

    def bound(self, rebuilt: PyTree) -> Any:
        """Returns what `rebuild` has returned as an object to call: a Linen module is bound."""
        return rebuilt


def takes_train(loss_fn: LossFn) -> bool:
    """Whether `loss_fn` is `loss_fn(model, batch, train)`, by its signature."""
    parameters = inspect.signature(loss_fn).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (
        any(p.kind is p.VAR_POSITIONAL for p in parameters)
        or any(p.name == "train" for p in parameters)
        or sum(p.default is p.empty for p in positional) > 2
    )


def refuse_constants(*functions: LossFn) -> None:
    """Refuses constants that no function would get.

    Raises:
      ConfigError: If no function has an argument `constants`.
    """
    if not any("constants" in inspect.signature(function).parameters for function in functions):
        raise ConfigError(
            "constants= were given, and loss_fn has no argument of that name. Write "
            "loss_fn(model, batch, train, constants)."
        )


def name_arguments(loss_fn: LossFn, constants: PyTree, key: jax.Array) -> LossFn:
    """The loss, with `constants` passed if it names them, and a key of its own if it names `key`.

    A `key` with a default other than None, such as a column's name, belongs to the loss. The key is
    the stream "loss" of the model's: another in every step, replica and micro-batch.

    Raises:
      UsageError: If the loss needs constants, and there are none.
    """
    defaults = {name: x.default for name, x in inspect.signature(loss_fn).parameters.items()}
    needed = inspect.Parameter.empty
    if constants is None and defaults.get("constants") is needed:
        raise UsageError(
            "loss_fn names `constants`, and was given none. Pass constants=, a tree of arrays, to "
            "init, step and evaluate; or take ddp.with_constants(constants)."
        )
    given = {} if constants is None or "constants" not in defaults else {"constants": constants}
    if defaults.get("key", "") in (needed, None):
        given["key"] = stream(key, "loss")
    return functools.partial(loss_fn, **given) if given else loss_fn


def call_loss(loss_fn: LossFn, model: object, batch: Batch, *, train: bool) -> PyTree:
    """Calls a loss, and passes `train` if it has that argument."""
    try:
        with jax.named_scope(LOSS):
            if not takes_train(loss_fn):
                return loss_fn(model, batch)
            by_name = "train" in inspect.signature(loss_fn).parameters
            return loss_fn(model, batch, train=train) if by_name else loss_fn(model, batch, train)
    except (KeyError, TypeError) as error:
        names = [*map(str, batch)] if isinstance(batch, Mapping) else None
        asks = "indices must be" in str(error) if names is None else isinstance(error, KeyError)
        frame = inspect.trace(0)[-1].frame  # The frame of the line that raised it.
        if not (asks and any(x is batch for x in frame.f_locals.values())):
            raise
        if names is None:
            mistake = f"the batch as a dict, but it is a {type(batch).__name__}. Yield dicts."
        elif holds := LEFT_OUT.get(error.args[0]):
            mistake = f"batch[{error}], which holds {holds}, and a device holds numbers. Encode it."
        else:
            mistake = f"batch[{error}], and the batch holds {', '.join(names)}."
        raise ConfigError(f"loss_fn reads {mistake}") from error


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a stream of random numbers."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


class Saved(TypedDict):
    """Fields of a state, as a checkpoint or an export has them."""

    params: Params
    model_state: NotRequired[ModelState]


def is_saved(values: PyTree) -> TypeGuard[Saved]:
    """Whether these are fields of a state, as a checkpoint or an export has them."""
    fields = {"params", "model_state", "ema_params", "ema_state"}
    return isinstance(values, Mapping) and {"params"} <= values.keys() <= fields


Model = Callable[..., Any]  # A bound Linen module, or an NNX module in the right mode.
ArrayBatch = Mapping[str, jax.Array]

# Names that modules have for the argument of training or evaluation, with its value in training.
_MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}


def call_model(
    model: Model,
    inputs: jax.Array,
    train: bool,
    mask: jax.Array | None = None,
    segments: jax.Array | None = None,
    loss_head: Callable[[jax.Array, jax.Array], Any] | None = None,
) -> Any:
    """The model's outputs, in training or evaluation mode.

    The mode is passed as `train`, `training`, `is_training` or `deterministic`, if `__call__` has
    such an argument. The mask of valid rows is passed as `mask`, for batch norms, if it has that
    argument. The documents of a packed row are passed as `segments`. A model with an argument
    `loss_head` is to return what this function makes of its hidden states and its table of output
    embeddings.

    Raises:
      ConfigError: If there are segments, and the model has no argument for them.
    """
    parameters = inspect.signature(model).parameters
    if segments is not None and "segments" not in parameters:
        raise ConfigError(
            "The batch holds segments, and the model has no argument 'segments' in __call__. "
            "Choose model.name=gpt, or data.kwargs.documents=cross."
        )
    options: dict[str, object] = {name: train == value for name, value in _MODES.items()}
    given = {"mask": mask, "segments": segments, "loss_head": loss_head}
    options |= {name: x for name, x in given.items() if x is not None}
    return model(inputs, **{name: x for name, x in options.items() if name in parameters})


def outputs(model: Model, batch: ArrayBatch) -> Any:
    """The outputs of a model in evaluation mode for the inputs of one of these losses."""
    for name in ("image", "tokens", "x"):
        if name in batch:
            inputs = batch[name][:, :-1] if name == "tokens" else batch[name]
            return call_model(model, inputs, False, segments=batch.get("segments"))
    raise ConfigError(
        f"The batch holds {', '.join(batch)}, of which none is known for the model's inputs. Give "
        "predict a function(model, batch)."
    )
