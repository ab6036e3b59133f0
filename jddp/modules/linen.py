"""A Linen module in functional form, and its batch norms synchronized."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import flax.errors
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from jddp.ground.errors import UsageError
from jddp.ground.typing import Batch, LossFn, ModelState, Params, Path, PyTree
from jddp.modules import batch_norm
from jddp.modules.base import FlaxModel, MeshAxes, is_saved, stream, takes_train
from jddp.modules.batch_norm import Sync
from jddp.modules.precision import CASTS, with_casts


class LinenModel(FlaxModel):
    """A Linen module; its variables are made by running the loss under `nn.init`."""

    # Collections for debuggers of a model: nothing writes them here.
    _OFF = ("perturbations",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.axes = MeshAxes()

    def init(self, loss_fn: LossFn, key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        """Runs the loss under `nn.init`."""
        loss = functools.partial(self.call, loss_fn, train=True)
        run = nn.init(loss, self.module, mutable=nn.DenyList(self._OFF))
        with self.axes.left_out():  # One notice covers boxes and constraints.
            params, model_state = self.split(run(self._streams(key), batch))
        return params, model_state or {}

    @with_casts
    def train(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> tuple[PyTree, ModelState]:
        """Runs the loss with everything except the parameters mutable."""
        loss = functools.partial(self.call, loss_fn, train=True)
        run = nn.apply(loss, self.module, mutable=nn.DenyList(("params", *self._OFF)))
        casts = CASTS.get()
        with casts.of_linen(), synced_linen(self.sync, is_synced=self.batch_norm == "sync"):
            variables = {"params": casts.narrow(params), **model_state}
            outputs, written = run(variables, batch, rngs=self._streams(key))
        if "batch_stats" in written and "batch_stats" not in model_state:
            raise _lacks_statistics("the model")
        return outputs, {name: written.get(name, old) for name, old in model_state.items()}

    @with_casts
    def evaluate(
        self, loss_fn: LossFn, params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> PyTree:
        """Runs the loss with no state to write; written values are dropped."""
        # Flax refuses a model that would train its statistics or drop units. A loss without the
        # argument `train` may write no state and has no keys. No loss has a key for "dropout": a
        # model that asks `has_rng("dropout")` would take it for training.
        is_told = takes_train(loss_fn)
        streams = {"params": stream(key, "params")} if is_told else {}
        kept = ("batch_stats",) if is_told else tuple(model_state)
        loss = functools.partial(self.call, loss_fn, train=False)
        # Written values, such as a cache, are dropped.
        run = nn.apply(loss, self.module, mutable=nn.DenyList(("params", *kept)))
        casts = CASTS.get()
        try:
            with casts.of_linen():
                return run({"params": casts.narrow(params), **model_state}, batch, rngs=streams)[0]
        except (flax.errors.InvalidRngError, flax.errors.ModifyScopeVariableError) as error:
            raise UsageError(
                "loss_fn runs the model in training mode during evaluation. Write loss_fn(model, "
                "batch, train) and pass train to the model, or give eval_fn=."
            ) from error

    def split(self, values: PyTree) -> tuple[Params, ModelState | None]:
        """Splits variables, or takes bare parameters."""
        values = self._without_axes(values)
        if is_saved(values):
            return values["params"], values.get("model_state")
        if not (isinstance(values, Mapping) and isinstance(values.get("params"), Mapping)):
            return values, None
        off = ("params", *self._OFF)
        rest = {k: v for k, v in values.items() if k not in off and not _is_sown(v)}
        return values["params"], rest or None

    def rebuild(self, params: Params, model_state: ModelState) -> PyTree:
        """Puts variables together."""
        return {"params": params, **model_state}

    def bound(self, rebuilt: Any) -> Any:
        """Binds the module to variables."""
        return self.module.bind(rebuilt)

    def kinds_at(self, path: Path) -> Sequence[str]:
        """The collection."""
        return [jax.tree_util.keystr(path[:1], simple=True)]

    def _without_axes(self, variables: PyTree) -> PyTree:
        """Takes the values out of the boxes in which Flax keeps the names of mesh axes."""

        def is_box(x: object) -> TypeGuard[nn.Partitioned[Any]]:
            return isinstance(x, nn.Partitioned)

        boxes = filter(is_box, jax.tree.leaves(variables, is_leaf=is_box))
        self.axes.report(box.names for box in boxes)
        return jax.tree.map(lambda x: x.value if is_box(x) else x, variables, is_leaf=is_box)

    def _streams(self, key: jax.Array) -> dict[str, jax.Array]:
        # Flax serves a stream that is not listed from "params"; "dropout" is listed because models
        # ask `has_rng("dropout")`.
        return {name: stream(key, name) for name in ("params", "dropout")}


def _lacks_statistics(layer: str) -> UsageError:
    return UsageError(
        f"init: params= were given alone, and {layer} also keeps running statistics, in "
        "'batch_stats'. Give all variables of the model, init(params=variables); or batch= too, "
        "from which it makes them."
    )


def _is_sown(collection: PyTree) -> bool:
    """Whether `sow` made a collection: its tuples grow with every run, and are no state."""
    leaves = jax.tree.leaves(collection, is_leaf=lambda x: isinstance(x, tuple))
    return any(isinstance(leaf, tuple) for leaf in leaves)


@contextlib.contextmanager
def synced_linen(sync: Sync, *, is_synced: bool = True) -> Iterator[None]:
    """Makes every `BatchNorm` that trains use statistics of the global batch, while open.

    Args:
      sync: Replicas whose statistics are taken together.
      is_synced: False for the statistics of each replica, even in layers that name an axis.
    """

    def intercept(
        call: Callable[..., Array], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> PyTree:
        layer = context.module
        if context.method_name != "__call__" or layer.scope is None or layer.is_initializing():
            return call(*args, **kwargs)
        if is_synced and batch_norm.is_registered(layer):
            return batch_norm.on_all_rows(call, args, kwargs, sync)
        if isinstance(layer, nn.BatchNorm):
            batch_norm.name_axis(layer, "/".join(layer.path), sync, is_synced=is_synced)
            if is_synced:
                return _normalize(layer, call, sync, *args, **kwargs)
        elif _is_copy(layer):
            batch_norm.give_axis(layer, "/".join(layer.path), sync, is_synced=is_synced)
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield


def _is_copy(layer: nn.Module) -> bool:
    """Whether a layer is a model library's own copy of batch norm."""
    kept = layer.variables.get("batch_stats", {}) if hasattr(layer, "axis_name") else {}
    return any(not isinstance(value, Mapping) for value in kept.values())


def _normalize(
    layer: nn.BatchNorm,
    call: Callable[..., Array],
    sync: Sync,
    x: Array,
    use_running_average: bool | None = None,
    *,
    mask: Array | None = None,
) -> Array:
    chosen = layer.use_running_average
    average = nn.merge_param("use_running_average", chosen, use_running_average)
    if average or layer.axis_index_groups is not None:
        return call(x, use_running_average, mask=mask)
    lowest = jnp.float32 if layer.force_float32_reductions else x.dtype
    exact = x.astype(jnp.promote_types(x.dtype, lowest))
    mean, var, count = batch_norm.moments(layer, exact, mask, sync)
    if not layer.has_variable("batch_stats", "mean"):
        raise _lacks_statistics("/".join(layer.path))
    running: list[Array] = [layer.get_variable("batch_stats", n) for n in ("mean", "var")]
    layer.put_variable("batch_stats", "mean", mean)
    layer.put_variable("batch_stats", "var", var)
    # Flax allows the choice at one place only, and a bound module is frozen.
    object.__setattr__(layer, "use_running_average", None)
    y = call(x, use_running_average=True)
    # A shared layer is called again, and needs its own choice.
    object.__setattr__(layer, "use_running_average", chosen)
    batch = (mean, sync.kept(var, count))
    for name, old, new in zip(("mean", "var"), running, batch, strict=True):
        layer.put_variable("batch_stats", name, batch_norm.move(layer.momentum, old, new, count))
    return y
