"""An NNX module in functional form, and its batch norms synchronized."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jddp.ground.errors import ConfigError
from jddp.ground.typing import Batch, LossFn, ModelState, Params, Path, PyTree
from jddp.modules import batch_norm
from jddp.modules.base import FlaxModel, MeshAxes, is_saved
from jddp.modules.batch_norm import Sync
from jddp.modules.precision import CASTS, derived, with_casts


class NnxModel(FlaxModel):
    """An NNX module, split once; its keys are the base keys of its streams."""

    def __init__(self, module: nnx.Module) -> None:
        self._graph, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
        kept = nnx.to_flat_state(parts[-1])
        self._kinds = {path: [c.__name__ for c in type(x).__mro__] for path, x in kept}
        self.axes = MeshAxes()
        boxes = (x.get_metadata() for _, x in nnx.to_flat_state(parts[0]))
        self.axes.report(metadata.get("out_sharding") for metadata in boxes)
        self._params, rngs, rest = map(nnx.to_pure_dict, parts)
        self._own = {"rngs": rngs, "rest": rest}
        self.values = self._params, self._own

    @with_casts
    def train(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> tuple[PyTree, ModelState]:
        """Runs the loss with a module of these values, in train mode."""
        module = self._merge(params, model_state, key)
        module.train()
        sync_nnx(module, self.sync, is_synced=self.batch_norm == "sync")
        CASTS.get().of_nnx(module)
        outputs = self.call(loss_fn, module, batch, train=True)
        parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
        _, own, _, left = parts
        if _paths(nnx.to_pure_dict(own)) != _paths(params):
            raise ConfigError(
                "The module has other parameters after the loss than before: they are made or "
                "removed while it runs. Make them in __init__, or run the module once before it is "
                "wrapped."
            )
        rest = _like(model_state["rest"], nnx.to_pure_dict(left))
        return outputs, {"rngs": model_state["rngs"], "rest": rest}

    @with_casts
    def evaluate(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> PyTree:
        """Runs the loss with a module of these values, in eval mode."""
        module = self._merge(params, model_state, key)
        module.eval()
        CASTS.get().of_nnx(module)
        return self.call(loss_fn, module, batch, train=False)

    def _merge(self, params: Params, model_state: ModelState, key: jax.Array) -> nnx.Module:
        rngs = jax.tree.map(lambda leaf: _fold(leaf, key), model_state["rngs"])
        return nnx.merge(self._graph, CASTS.get().narrow(params), rngs, model_state["rest"])

    def split(self, values: PyTree) -> tuple[Params, ModelState]:
        """Splits a state by kinds of variables, or takes bare parameters."""
        if is_saved(values) and "params" not in self._params:
            rest = values.get("model_state", self._own).get("rest", self._own["rest"])
            return values["params"], {**self._own, "rest": rest}
        if not isinstance(values, nnx.State):
            return values, self._own
        params, rngs, rest = map(
            nnx.to_pure_dict, nnx.split_state(values, nnx.Param, nnx.RngState, ...)
        )
        return params, {"rngs": rngs or self._own["rngs"], "rest": rest or self._own["rest"]}

    def kinds_at(self, path: Path) -> Sequence[str]:
        """The variable's classes."""
        return self._kinds.get(
            tuple(entry.key for entry in path[1:] if isinstance(entry, jax.tree_util.DictKey)), []
        )

    def rebuild(self, params: Params, model_state: ModelState) -> nnx.Module:
        """Makes a module of these values, in eval mode."""
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
    """The part of `new` with a place in `old`: sown values would change the state's form."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {name: _like(value, new[name]) for name, value in old.items()}


def sync_nnx(module: nnx.Module, sync: Sync, *, is_synced: bool = True) -> None:
    """Makes every `nnx.BatchNorm` inside `module` use statistics of the global batch.

    Args:
      module: The step's own copy; its batch-norm layers change class.
      sync: Replicas whose statistics are taken together.
      is_synced: False for the statistics of each replica, even in layers that name an axis.
    """
    for path, node in nnx.iter_graph(module):
        if is_synced and batch_norm.is_registered(node):
            cls: Any = type(node)
            node.__class__ = _gathering_class(cls, sync)
        elif isinstance(node, nnx.BatchNorm):
            node.__class__ = _synced_class(type(node), sync, is_synced)
        elif hasattr(node, "axis_name") and any(
            isinstance(value, nnx.BatchStat) for value in vars(node).values()
        ):
            batch_norm.give_axis(node, "/".join(map(str, path)), sync, is_synced=is_synced)


@functools.cache
def _synced_class(cls: Any, sync: Sync, is_synced: bool) -> Any:
    def call(
        self: Any, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
    ) -> Array:
        chosen = self.use_running_average
        average = chosen if use_running_average is None else use_running_average
        # The axis is named here and not earlier, since a model may map axes of its own.
        named = self.axis_name
        batch_norm.name_axis(self, cls.__name__, sync, is_synced=is_synced)
        if average or not is_synced or self.axis_index_groups is not None:
            y = cls.__call__(self, x, use_running_average=average, mask=mask)
        else:
            y = _normalize(self, functools.partial(cls.__call__, self), x, mask, sync)
        object.__setattr__(self, "axis_name", named)
        return y

    return derived(cls, __call__=call)


@functools.cache
def _gathering_class(cls: Any, sync: Sync) -> type:
    def call(self: Any, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return batch_norm.on_all_rows(functools.partial(cls.__call__, self), args, kwargs, sync)

    return type(cls.__name__, (cls,), {"__call__": call})


def _normalize(
    layer: nnx.BatchNorm, call: Callable[..., Array], x: Array, mask: Array | None, sync: Sync
) -> Array:
    exact = jnp.promote_types(x.dtype, jnp.float32)
    mean, var, count = batch_norm.moments(layer, x.astype(exact), mask, sync)
    running = (layer.mean[...], layer.var[...])
    dtype = layer.dtype
    # A layer of low precision would round these statistics. So it computes in `exact`.
    layer.mean[...] = mean
    layer.var[...] = var
    layer.dtype = exact
    y = call(x, use_running_average=True)
    layer.mean[...] = batch_norm.move(layer.momentum, running[0], mean, count)
    layer.var[...] = batch_norm.move(layer.momentum, running[1], sync.kept(var, count), count)
    layer.dtype = dtype
    return y if dtype is None else y.astype(dtype)
