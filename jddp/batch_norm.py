"""Keep batch-norm statistics in step over the replicas, for models that were not written for it.

Batch norm in training is batch norm in evaluation with the batch's own statistics. So a layer is
synchronised without touching the model: compute mean and variance over the *global* batch, lend
them to the layer as its running statistics, let it normalise with those, then give it back its
running statistics moved by its momentum. Sums and counts travel, so replicas whose masks differ
weigh by what they hold. One all-reduce per layer and direction.

    with synced_linen(sync) as synced: ...              # while a Linen model runs
    synced = sync_nnx(module, sync)                     # on the step's copy of an NNX module
    model_state = settle(old, new, mode="sync", ...)    # what other layers wrote

Model libraries carry copies of the class. A layer that keeps `batch_stats` and has a field
`axis_name` is taken for one, and is given the axis: it then averages over replicas by itself.

This room knows Flax's BatchNorm classes and the name of one mesh axis.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Sync:
    """Over which replicas batch statistics are taken, and how they are kept.

    Attributes:
      axis: Name of the mapped axis.
      group_size: Replicas that share statistics, neighbours; None for all.
      unbiased: Whether the running variance is n / (n - 1) times that of the batch, as PyTorch's.
    """

    axis: str
    group_size: int | None = None
    unbiased: bool = False

    def check(self, num_replicas: int, mode: str) -> None:
        """Holds the options to their rules.

        Raises:
          ConfigError: If there are no such groups.
        """
        if mode != "sync" and (self.group_size is not None or self.unbiased):
            raise ConfigError(
                f"batch_norm_group_size and batch_norm_unbiased say how batch_norm='sync' is done; "
                f"batch_norm is {mode!r}. Leave them out."
            )
        if self.group_size is not None and (self.group_size < 1 or num_replicas % self.group_size):
            sizes = [k for k in range(1, num_replicas + 1) if num_replicas % k == 0]
            raise ConfigError(
                f"batch_norm_group_size={self.group_size} does not divide {num_replicas} replicas. "
                f"Choose one of {sizes}."
            )

    @property
    def groups(self) -> list[list[int]] | None:
        """The replicas of each group, where there are several."""
        size = self.group_size
        if size is None or size == (num_replicas := lax.axis_size(self.axis)):
            return None
        return [list(range(first, first + size)) for first in range(0, num_replicas, size)]

    def psum(self, x: Array) -> Array:
        """Sums over the replicas of a group."""
        total: Array = lax.psum(x, self.axis, axis_index_groups=self.groups)
        return total

    def kept(self, var: Array, count: Array) -> Array:
        """What the running variance moves to, from that of `count` values."""
        return var * count / jnp.maximum(count - 1, 1) if self.unbiased else var


def sync_batch_norm(model: Any, axis: str = "data") -> Any:
    """Returns a model whose batch norms take the statistics of all replicas, for one's own step.

    The counterpart of PyTorch's `convert_sync_batchnorm`. `jddp.DataParallel` does it by itself.

    Args:
      model: A Linen module, which then does so in `apply`, or an NNX module, which is copied.
      axis: Of the `pmap` or `shard_map` in which it trains.

    Raises:
      ConfigError: If it is neither.
    """
    sync = Sync(axis)
    if isinstance(model, nnx.Module):
        copy = nnx.clone(model)
        sync_nnx(copy, sync)
        return copy
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is {type(model).__name__}. Give an instance of flax.linen.Module or "
            "flax.nnx.Module."
        )

    class Synced(type(model)):  # type: ignore[misc]  # a base known only at run time
        @nn.nowrap
        def apply(self, *args: Any, **kwargs: Any) -> Any:
            with synced_linen(sync):
                return super().apply(*args, **kwargs)

    Synced.__name__, Synced.__qualname__ = type(model).__name__, type(model).__qualname__
    names = [field.name for field in dataclasses.fields(model) if field.init]
    return Synced(**{name: getattr(model, name) for name in names if name != "parent"})


@contextlib.contextmanager
def synced_linen(sync: Sync) -> Iterator[set[Path]]:
    """While open, every Linen `BatchNorm` that trains uses statistics of the global batch.

    Yields:
      The paths of the layers that did, filled in while the model runs.
    """
    synced: set[Path] = set()

    def intercept(
        call: Callable[..., Array], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        if context.method_name != "__call__" or layer.is_initializing():
            return call(*args, **kwargs)
        if isinstance(layer, nn.SpectralNorm):
            synced.add(layer.path)  # its statistics are of weights, which replicas have alike
        if _is_copy(layer):
            synced.add(layer.path)
            _give_axis(layer, "/".join(layer.path), sync)
        if not isinstance(layer, nn.BatchNorm):
            return call(*args, **kwargs)
        _refuse_foreign_axis("/".join(layer.path), layer.axis_name, sync.axis)
        x, average, mask = _arguments(*args, **kwargs)
        average = nn.merge_param("use_running_average", layer.use_running_average, average)
        if average or layer.axis_index_groups is not None:
            return call(*args, **kwargs)
        synced.add(layer.path)
        lowest = jnp.float32 if layer.force_float32_reductions else x.dtype
        exact = x.astype(jnp.promote_types(x.dtype, lowest))
        mean, var, count = _moments(layer, exact, mask, sync)
        running: list[Array] = [layer.get_variable("batch_stats", n) for n in ("mean", "var")]
        layer.put_variable("batch_stats", "mean", mean)
        layer.put_variable("batch_stats", "var", var)
        # Flax takes the choice at one place only; a bound module is frozen.
        field, chosen = "use_running_average", layer.use_running_average
        object.__setattr__(layer, field, None)
        y = call(x, use_running_average=True)
        object.__setattr__(layer, field, chosen)  # a layer that is shared is called again
        batch = (mean, sync.kept(var, count))
        for name, old, new in zip(("mean", "var"), running, batch, strict=True):
            layer.put_variable("batch_stats", name, _move(layer.momentum, old, new))
        return y

    with nn.intercept_methods(intercept):
        yield synced


def _is_copy(layer: nn.Module) -> bool:
    """Whether this is a model library's own copy of batch norm."""
    if isinstance(layer, nn.BatchNorm) or not hasattr(layer, "axis_name"):
        return False
    kept = layer.variables.get("batch_stats", {})
    return any(not isinstance(value, Mapping) for value in kept.values())


def _give_axis(layer: Any, path: str, sync: Sync) -> None:
    _refuse_foreign_axis(path, layer.axis_name, sync.axis)
    object.__setattr__(layer, "axis_name", sync.axis)  # a bound Linen module is frozen
    if sync.groups is not None and getattr(layer, "axis_index_groups", None) is None:
        if not hasattr(layer, "axis_index_groups"):
            raise ConfigError(
                f"{path!r} is a batch norm of its own that knows no groups of replicas. Leave "
                "batch_norm_group_size out, or give it a field axis_index_groups."
            )
        object.__setattr__(layer, "axis_index_groups", sync.groups)


def sync_nnx(module: nnx.Module, sync: Sync) -> set[Path]:
    """Makes every `nnx.BatchNorm` inside `module` use statistics of the global batch.

    Args:
      module: The step's own copy; its batch-norm layers change class.
      sync: Over which replicas, and how.

    Returns:
      The paths of the layers.
    """
    synced: set[Path] = set()
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm):
            _refuse_foreign_axis("/".join(map(str, path)), node.axis_name, sync.axis)
            if node.axis_index_groups is None:
                node.__class__ = _synced_class(type(node), sync)
                synced.add(tuple(path))
        elif isinstance(node, nnx.SpectralNorm):
            synced.add(tuple(path))
        elif hasattr(node, "axis_name") and _holds_statistics(node):
            _give_axis(node, "/".join(map(str, path)), sync)
            synced.add(tuple(path))
    return synced


def _holds_statistics(node: Any) -> bool:
    return any(isinstance(value, nnx.BatchStat) for value in vars(node).values())


@functools.cache
def _synced_class(cls: type[nnx.BatchNorm], sync: Sync) -> type[nnx.BatchNorm]:
    class Synced(cls):  # type: ignore[misc,valid-type]  # a base known only at run time
        def __call__(
            self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
        ) -> Array:
            average = (
                self.use_running_average if use_running_average is None else use_running_average
            )
            if average:
                return super().__call__(x, use_running_average=True)
            return _normalize_nnx(self, super().__call__, x, mask, sync)

    Synced.__name__, Synced.__qualname__ = cls.__name__, cls.__qualname__
    return Synced


def _normalize_nnx(
    layer: nnx.BatchNorm, call: Callable[..., Array], x: Array, mask: Array | None, sync: Sync
) -> Array:
    exact = jnp.promote_types(x.dtype, jnp.float32)
    mean, var, count = _moments(layer, x.astype(exact), mask, sync)
    running, dtype = (layer.mean[...], layer.var[...]), layer.dtype
    # A layer of low precision would round the lent statistics, so it computes in `exact`.
    layer.mean[...], layer.var[...], layer.dtype = mean, var, exact
    y = call(x, use_running_average=True)
    layer.mean[...] = _move(layer.momentum, running[0], mean)
    layer.var[...] = _move(layer.momentum, running[1], sync.kept(var, count))
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


def _moments(layer: Any, x: Array, mask: Array | None, sync: Sync) -> tuple[Array, Array, Array]:
    """Mean and biased variance of `x` over replicas and all dims but the layer's features; counts.

    `use_fast_variance` is the layer's own choice: E[x^2] - E[x]^2 in one all-reduce, or the mean of
    squared deviations in a second one.
    """
    features = layer.axis if isinstance(layer.axis, Sequence) else (layer.axis,)
    kept = {feature % x.ndim for feature in features}
    dims = tuple(dim for dim in range(x.ndim) if dim not in kept)
    total = functools.partial(_masked_sum, dims=dims, mask=mask)
    count = total(jnp.ones_like(x, x.real.dtype))
    if layer.use_fast_variance:
        sums = sync.psum(jnp.stack([total(x), total(_square(x)).astype(x.dtype), count]))
        count = jnp.maximum(sums[2].real, 1.0)
        mean = sums[0] / count
        return mean, jnp.maximum(0.0, sums[1].real / count - _square(mean)), count
    sums = sync.psum(jnp.stack([total(x), count.astype(x.dtype)]))
    count = jnp.maximum(sums[1].real, 1.0)
    mean = sums[0] / count
    deviations = _square(x - jnp.expand_dims(mean, dims))
    return mean, sync.psum(total(deviations)) / count, count


def _masked_sum(x: Array, *, dims: tuple[int, ...], mask: Array | None) -> Array:
    where = None if mask is None else jnp.broadcast_to(mask, x.shape).astype(bool)
    return jnp.sum(x, dims, where=where)


def _square(x: Array) -> Float[Array, "..."]:
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def settle(
    old: PyTree,
    new: PyTree,
    *,
    mode: Mode,
    synced: Callable[[Path], bool],
    own: Callable[[Path], bool],
    sync: Sync,
) -> Any:
    """Makes what the model wrote beside its parameters agree over the replicas.

    Under "sync", synced layers agree already, or are averaged over their groups; floating leaves
    that anything else wrote are averaged, and named once while tracing. Under "broadcast", replica
    0's values win, as with DDP's `broadcast_buffers`. What each replica keeps for itself, all of it
    under "local", is left alone.
    Integers and keys are left as they are: they count steps, which replicas take together.

    Args:
      old: The state that the model was given.
      new: The state that it left.
      mode: One of `MODES`.
      synced: Whether the leaf at a path was written by a synced layer.
      own: Whether each replica keeps its own of the leaf at a path.
      sync: Over which replicas statistics were taken.
    """
    axis = sync.axis

    def agree(path: Path, before: Array, after: Array) -> Array:
        if after is before or own(path) or not jnp.issubdtype(after.dtype, jnp.inexact):
            return after
        if mode == "broadcast":
            return lax.psum(jnp.where(lax.axis_index(axis) == 0, after, 0), axis)
        if synced(path):
            return after if sync.groups is None else lax.pmean(after, axis)
        log.warning(
            "%s is written by a layer that jddp cannot synchronise; its value is averaged over "
            "the replicas each step.",
            jax.tree_util.keystr(path, simple=True, separator="/"),
        )
        return lax.pmean(after, axis)

    return jax.tree_util.tree_map_with_path(agree, old, new)
