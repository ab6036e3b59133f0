"""A Linen module in functional form."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.errors
import jax
from flax import linen as nn

from jddp.errors import UsageError
from jddp.modules.base import FlaxModel, call_loss, is_saved, stream, takes_train, tell_axes
from jddp.modules.batch_norm import Path, synced_linen
from jddp.typing import Batch, LossFn, ModelState, Params, PyTree


class LinenModel(FlaxModel):
    """A Linen module; its variables are made by running the loss under `nn.init`."""

    # Collections for debuggers of a model, which nothing writes here.
    _OFF = ("perturbations",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def init(self, loss_fn: LossFn, key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        """Runs the loss under `nn.init`."""
        run = nn.init(
            lambda model, batch: call_loss(loss_fn, model, batch, train=True),
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
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> tuple[Any, ModelState]:
        """Runs the loss with all but the parameters mutable."""
        run = nn.apply(
            lambda model, batch: call_loss(loss_fn, model, batch, train=True),
            self._module,
            mutable=nn.DenyList(("params", *self._OFF)),
        )
        with synced_linen(self.sync, is_synced=self.batch_norm == "sync"):
            variables = {"params": params, **model_state}
            outputs, written = run(variables, batch, rngs=self._streams(key))
        return outputs, {name: written.get(name, old) for name, old in model_state.items()}

    def evaluate(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> Any:
        """Runs the loss with no state to write; written values are dropped."""
        # Flax refuses a model that would train its statistics or drop units. A loss without the
        # argument `train` may write no state and has no keys; and none has one for "dropout", which
        # a model that asks `has_rng("dropout")` takes for training.
        is_told = takes_train(loss_fn)
        streams = {"params": stream(key, "params")} if is_told else {}
        kept = ("batch_stats",) if is_told else tuple(model_state)
        run = nn.apply(
            lambda model, batch: call_loss(loss_fn, model, batch, train=False),
            self._module,
            # Written values, such as a cache, are dropped.
            mutable=nn.DenyList(("params", *kept)),
        )
        try:
            outputs, _ = run({"params": params, **model_state}, batch, rngs=streams)
            return outputs
        except (flax.errors.InvalidRngError, flax.errors.ModifyScopeVariableError) as error:
            raise UsageError(
                "This model trains while it is evaluated. Write loss_fn(model, batch, train) and "
                "pass train to the model, or give eval_fn=."
            ) from error

    def split(self, values: PyTree) -> tuple[Params, ModelState | None]:
        """Splits variables, or takes bare parameters."""
        values = _without_axes(values)
        if is_saved(values):
            return values["params"], values.get("model_state")
        if not (isinstance(values, Mapping) and isinstance(values.get("params"), Mapping)):
            return values, None
        off = ("params", *self._OFF)
        rest = {k: v for k, v in values.items() if k not in off and not _is_sown(v)}
        return values["params"], rest or None

    def rebuild(self, params: Params, model_state: ModelState) -> Any:
        """Puts variables together."""
        return {"params": params, **model_state}

    def kinds_at(self, path: Path) -> Sequence[str]:
        """The collection."""
        return [path[0].key]

    def _streams(self, key: jax.Array) -> dict[str, jax.Array]:
        # Flax serves a stream that is not listed from "params"; "dropout" is listed because models
        # ask `has_rng("dropout")`.
        return {name: stream(key, name) for name in ("params", "dropout")}


def _is_sown(collection: PyTree) -> bool:
    """Whether `sow` made it: a tuple that grows with every run, which is no state."""
    leaves = jax.tree.leaves(collection, is_leaf=lambda x: isinstance(x, tuple))
    return any(isinstance(leaf, tuple) for leaf in leaves)


def _without_axes(variables: PyTree) -> PyTree:
    """Takes the values out of the boxes in which Flax keeps the names of mesh axes."""

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.Partitioned)

    boxes = filter(is_box, jax.tree.leaves(variables, is_leaf=is_box))
    tell_axes(box.names for box in boxes)
    return jax.tree.map(lambda x: x.value if is_box(x) else x, variables, is_leaf=is_box)
