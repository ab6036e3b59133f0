"""Keep batch-norm statistics in step over the replicas, for models that were not written for it.

Batch norm in training is batch norm in evaluation with the batch's own statistics. So a layer is
synchronised without touching the model: compute mean and variance over the *global* batch, lend
them to the layer as its running statistics, let it normalise with those, then give it back its
running statistics moved by its momentum. Sums and counts travel, so replicas whose masks differ
weigh by what they hold. One all-reduce per layer and direction.

    with synced_linen("data") as synced: ...            # while a Linen model runs
    synced = sync_nnx(module, "data")                   # on the step's copy of an NNX module
    model_state = settle(old, new, mode="sync", ...)    # what other layers wrote

This room knows Flax's BatchNorm classes and the name of one mesh axis.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jddp.errors import ConfigError

PyTree = Any
Path = tuple[Any, ...]
Mode = Literal["sync", "broadcast", "local"]
MODES = ("sync", "broadcast", "local")

log = logging.getLogger("jddp")


@contextlib.contextmanager
def synced_linen(axis: str) -> Iterator[set[Path]]:
    """While open, every Linen `BatchNorm` that trains uses statistics of the global batch.

    Yields:
      The paths of the layers that did, filled in while the model runs.
    """
    synced: set[Path] = set()

    def intercept(
        call: Callable[..., Array], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        if not isinstance(layer, nn.BatchNorm) or context.method_name != "__call__":
            return call(*args, **kwargs)
        _refuse_foreign_axis("/".join(layer.path), layer.axis_name, axis)
        x, average, mask = _arguments(*args, **kwargs)
        average = nn.merge_param("use_running_average", layer.use_running_average, average)
        if average or layer.is_initializing() or layer.axis_index_groups is not None:
            return call(*args, **kwargs)
        synced.add(layer.path)
        lowest = jnp.float32 if layer.force_float32_reductions else x.dtype
        mean, var = _moments(layer, x.astype(jnp.promote_types(x.dtype, lowest)), mask, axis)
        running: list[Array] = [layer.get_variable("batch_stats", n) for n in ("mean", "var")]
        layer.put_variable("batch_stats", "mean", mean)
        layer.put_variable("batch_stats", "var", var)
        # Flax takes the choice at one place only; a bound module is frozen.
        object.__setattr__(layer, "use_running_average", None)
        y = call(x, use_running_average=True)
        for name, old, new in zip(("mean", "var"), running, (mean, var), strict=True):
            layer.put_variable("batch_stats", name, _move(layer.momentum, old, new))
        return y

    with nn.intercept_methods(intercept):
        yield synced


def sync_nnx(module: nnx.Module, axis: str) -> set[Path]:
    """Makes every `nnx.BatchNorm` inside `module` use statistics of the global batch.

    Args:
      module: The step's own copy; its batch-norm layers change class.
      axis: Name of the mapped axis.

    Returns:
      The paths of the layers.
    """
    synced: set[Path] = set()
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm):
            _refuse_foreign_axis("/".join(map(str, path)), node.axis_name, axis)
            if node.axis_index_groups is None:
                node.__class__ = _synced_class(type(node), axis)
                synced.add(tuple(path))
    return synced


@functools.cache
def _synced_class(cls: type[nnx.BatchNorm], axis: str) -> type[nnx.BatchNorm]:
    class Synced(cls):  # type: ignore[misc,valid-type]  # a base known only at run time
        def __call__(
            self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
        ) -> Array:
            average = (
                self.use_running_average if use_running_average is None else use_running_average
            )
            if average:
                return super().__call__(x, use_running_average=True)
            return _normalize_nnx(self, super().__call__, x, mask, axis)

    Synced.__name__, Synced.__qualname__ = cls.__name__, cls.__qualname__
    return Synced


def _normalize_nnx(
    layer: nnx.BatchNorm, call: Callable[..., Array], x: Array, mask: Array | None, axis: str
) -> Array:
    exact = jnp.promote_types(x.dtype, jnp.float32)
    mean, var = _moments(layer, x.astype(exact), mask, axis)
    running, dtype = (layer.mean[...], layer.var[...]), layer.dtype
    # A layer of low precision would round the lent statistics, so it computes in `exact`.
    layer.mean[...], layer.var[...], layer.dtype = mean, var, exact
    y = call(x, use_running_average=True)
    layer.mean[...] = _move(layer.momentum, running[0], mean)
    layer.var[...] = _move(layer.momentum, running[1], var)
    layer.dtype = dtype
    return y if dtype is None else y.astype(dtype)


def _arguments(
    x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
) -> tuple[Array, bool | None, Array | None]:
    return x, use_running_average, mask


def _refuse_foreign_axis(path: str, axis_name: str | None, axis: str) -> None:
    if axis_name not in (None, axis):
        raise ConfigError(
            f"BatchNorm {path!r} averages over axis {axis_name!r}, which this mesh lacks: its axis "
            f"is {axis!r}. Leave axis_name out; jddp synchronises the layer."
        )


def _move(momentum: float, running: Array, batch: Array) -> Array:
    moved = momentum * running + (1 - momentum) * batch.astype(running.dtype)
    return lax.stop_gradient(moved)


def _moments(layer: Any, x: Array, mask: Array | None, axis: str) -> tuple[Array, Array]:
    """Mean and biased variance of `x` over all replicas and all dims but the layer's features.

    `use_fast_variance` is the layer's own choice: E[x^2] - E[x]^2 in one all-reduce, or the mean of
    squared deviations in a second one.
    """
    features = layer.axis if isinstance(layer.axis, Sequence) else (layer.axis,)
    kept = {feature % x.ndim for feature in features}
    dims = tuple(dim for dim in range(x.ndim) if dim not in kept)
    total = functools.partial(_masked_sum, dims=dims, mask=mask)
    count = total(jnp.ones_like(x, x.real.dtype))
    if layer.use_fast_variance:
        sums = lax.psum(jnp.stack([total(x), total(_square(x)).astype(x.dtype), count]), axis)
        count = jnp.maximum(sums[2].real, 1.0)
        mean = sums[0] / count
        return mean, jnp.maximum(0.0, sums[1].real / count - _square(mean))
    sums = lax.psum(jnp.stack([total(x), count.astype(x.dtype)]), axis)
    count = jnp.maximum(sums[1].real, 1.0)
    mean = sums[0] / count
    deviations = _square(x - jnp.expand_dims(mean, dims))
    return mean, lax.psum(total(deviations), axis) / count


def _masked_sum(x: Array, *, dims: tuple[int, ...], mask: Array | None) -> Array:
    where = None if mask is None else jnp.broadcast_to(mask, x.shape).astype(bool)
    return jnp.sum(x, dims, where=where)


def _square(x: Array) -> Float[Array, "..."]:
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def settle(
    old: PyTree, new: PyTree, *, mode: Mode, synced: Callable[[Path], bool], axis: str
) -> Any:
    """Makes what the model wrote beside its parameters agree over the replicas.

    Under "sync", synced layers agree already; floating leaves that anything else wrote are
    averaged, and named once while tracing. Under "broadcast", replica 0's values win, as with
    DDP's `broadcast_buffers`. Under "local" each replica keeps its own. Integers and keys are
    left as they are: they count steps, which replicas take together.

    Args:
      old: The state that the model was given.
      new: The state that it left.
      mode: One of `MODES`.
      synced: Whether the leaf at a path was written by a synced layer.
      axis: Name of the mapped axis.
    """
    if mode == "local":
        return new

    def agree(path: Path, before: Array, after: Array) -> Array:
        if after is before or not jnp.issubdtype(after.dtype, jnp.inexact):
            return after
        if mode == "broadcast":
            return lax.psum(jnp.where(lax.axis_index(axis) == 0, after, 0), axis)
        if synced(path):
            return after
        log.warning(
            "%s is written by a layer that jddp cannot synchronise; its value is averaged over "
            "the replicas each step.",
            jax.tree_util.keystr(path, simple=True, separator="/"),
        )
        return lax.pmean(after, axis)

    return jax.tree_util.tree_map_with_path(agree, old, new)
