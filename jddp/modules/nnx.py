"""An NNX module in functional form."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jddp.errors import ConfigError
from jddp.modules.base import FlaxModel, call_loss, is_saved, tell_axes
from jddp.modules.batch_norm import Path, sync_nnx
from jddp.typing import Batch, LossFn, ModelState, Params, PyTree


class NnxModel(FlaxModel):
    """An NNX module, split once; its keys are the base keys of its streams."""

    def __init__(self, module: nnx.Module) -> None:
        self._graph, *parts = nnx.split(module, nnx.Param, nnx.RngState, ...)
        kept = nnx.to_flat_state(parts[-1])
        self._kinds = {path: [c.__name__ for c in type(x).__mro__] for path, x in kept}
        tell_axes(x.get_metadata().get("out_sharding") for _, x in nnx.to_flat_state(parts[0]))
        params, rngs, rest = map(nnx.to_pure_dict, parts)
        self._own = {"rngs": rngs, "rest": rest}
        self.values = params, self._own

    def init(self, loss_fn: LossFn, key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        """Is not called: the module has its values."""
        raise AssertionError("an NNX module has its values")

    def train(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> tuple[Any, ModelState]:
        """Runs the loss with a module of these values, in train mode."""
        rngs = jax.tree.map(lambda leaf: _fold(leaf, key), model_state["rngs"])
        module = nnx.merge(self._graph, params, rngs, model_state["rest"])
        module.train()
        sync_nnx(module, self.sync, is_synced=self.batch_norm == "sync")
        outputs = call_loss(loss_fn, module, batch, train=True)
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

    def evaluate(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> Any:
        """Runs the loss with a module of these values, in eval mode."""
        rngs = jax.tree.map(lambda leaf: _fold(leaf, key), model_state["rngs"])
        module = self.rebuild(params, {"rngs": rngs, "rest": model_state["rest"]})
        return call_loss(loss_fn, module, batch, train=False)

    def split(self, values: PyTree) -> tuple[Params, ModelState]:
        """Splits a state by kinds of variables, or takes bare parameters."""
        if is_saved(values) and "params" not in cast(Any, self.values)[0]:
            rest = values.get("model_state", {}).get("rest", self._own["rest"])
            return values["params"], {**self._own, "rest": rest}
        if not isinstance(values, nnx.State):
            return values, self._own
        params, rngs, rest = map(
            nnx.to_pure_dict, nnx.split_state(values, nnx.Param, nnx.RngState, ...)
        )
        return params, {"rngs": rngs or self._own["rngs"], "rest": rest or self._own["rest"]}

    def kinds_at(self, path: Path) -> Sequence[str]:
        """The variable's classes."""
        return self._kinds.get(tuple(entry.key for entry in path[1:]), [])

    def rebuild(self, params: Params, model_state: ModelState) -> Any:
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
    """The part of `new` that has a place in `old`: sown values would change the state's form."""
    if not isinstance(old, dict):
        return new
    if gone := sorted(map(str, old.keys() - new.keys())):
        raise ConfigError(
            f"The module has lost its {gone[0]!r} in the loss. Let it keep its variables."
        )
    return {name: _like(value, new[name]) for name, value in old.items()}
