"""Synchronize batch-norm statistics over the replicas, for models that were not written for it.

Batch norm in training is batch norm in evaluation with the batch's own statistics. So a layer is
synchronized without touching the model: mean and variance over the *global* batch are given to the
layer as its running statistics, it normalizes with those, and then its running statistics are set
again, moved by its momentum. Sums and counts are sent, so replicas whose masks differ
are weighted by their valid rows. One all-reduce per layer and direction.

    with synced_linen(sync): ...                          # while a Linen model runs
    sync_nnx(module, sync)                                # on the step's copy of an NNX module
    model_state = settle(old, new, labels, mode="sync")   # other state of the model

Model libraries carry copies of the class. A layer that keeps `batch_stats` and has a field
`axis_name` is taken for one, and is given the axis: it then averages over replicas by itself. A
layer of a class that is registered and knows no axis is called with the rows of all replicas.

This room knows Flax's BatchNorm classes and the name of one mesh axis.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jddp.errors import ConfigError
from jddp.modules.varying import EQUAL, GROUPED
from jddp.reduce.pairwise import add_in_pairs
from jddp.typing import PyTree

Path = tuple[Any, ...]
Mode = Literal["sync", "broadcast", "local"]
MODES = ("sync", "broadcast", "local")
REDUCTIONS = ("mean", "sum", "first")
STATISTICS = {"batch_stats", "BatchStat"}  # kinds of state, in Linen and in NNX
_REGISTERED: set[type] = set()


@dataclasses.dataclass(frozen=True)
class Sync:
    """Replicas whose batch statistics are taken together, and rules for other state.

    Attributes:
      axis: Name of the mapped axis.
      group_size: Number of neighbouring replicas that share statistics; None for all.
      unbiased: Whether the running variance is n / (n - 1) times that of the batch, as PyTorch's.
      num_shards: Number of logical replicas, synchronized at the end of a step; None for devices.
      rules: Pairs of a kind of other state, and the one of `REDUCTIONS` that synchronizes it.
    """

    axis: str
    group_size: int | None = None
    unbiased: bool = False
    num_shards: int | None = None
    rules: tuple[tuple[str, str], ...] = ()

    def check(self, num_replicas: int, mode: str) -> None:
        """Refuses options that break their rules.

        Raises:
          ConfigError: If there are no such groups.
        """
        if mode != "sync" and (self.group_size is not None or self.unbiased):
            raise ConfigError(
                f"batch_norm_group_size and batch_norm_unbiased are options of batch_norm='sync'; "
                f"batch_norm is {mode!r}. Leave them out."
            )
        if self.group_size is not None and (self.group_size < 1 or num_replicas % self.group_size):
            sizes = [k for k in range(1, num_replicas + 1) if num_replicas % k == 0]
            raise ConfigError(
                f"batch_norm_group_size={self.group_size} does not divide {num_replicas} replicas. "
                f"Choose one of {sizes}."
            )

    @property
    def num_replicas(self) -> int:
        """How many replicas there are, inside a mapped function."""
        num: int = self.num_shards or lax.axis_size(self.axis)
        return num

    def rule(self, kinds: Sequence[str]) -> str | None:
        """The declared rule of the first of these kinds that has one."""
        rules = dict(self.rules)
        return next((rules[kind] for kind in kinds if kind in rules), None)

    def add(self, rows: Array) -> Array:
        """Adds rows over all replicas; those of logical ones in one order."""
        if self.num_shards is None:
            total: Array = lax.psum(rows[0], self.axis)
            return total
        return add_in_pairs(lax.all_gather(rows, self.axis, tiled=True))

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
        """The variance that the running one moves to, from that of `count` values."""
        return var * count / jnp.maximum(count - 1, 1) if self.unbiased else var


def register_batch_norm(cls: Any) -> Any:
    """Lets jddp synchronize a batch norm that is not Flax's own, under `batch_norm="sync"`.

    A layer of the class is then called with the rows of all replicas, and of its output each
    replica keeps its own rows. That is exact for any layer that needs no more than the rows, and
    costs each replica the layer's work for the global batch, and memory for its input. A field
    `axis_name`, as Flax's own class has, is cheaper and needs no registration.

    Args:
      cls: A class of Linen or NNX modules, called with arrays whose first dim is the rows.

    Returns:
      The class, so that this may be its decorator.

    Raises:
      ConfigError: If it is no class of Flax modules.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module | nnx.Module)):
        raise ConfigError(f"register_batch_norm: {cls!r} is no class of Flax modules. Give one.")
    _REGISTERED.add(cls)
    return cls


def sync_batch_norm(model: Any, axis: str = "data") -> Any:
    """Returns a model whose batch norms take the statistics of all replicas, for your own step.

    The counterpart of PyTorch's `convert_sync_batchnorm`. `jddp.DataParallel` does it by itself.

    Args:
      model: A Linen module, which then does so in `apply`, or an NNX module, which is copied.
      axis: Name of the axis of the `pmap` or `shard_map` in which it trains.

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
def synced_linen(sync: Sync, *, is_synced: bool = True) -> Iterator[None]:
    """While open, every Linen `BatchNorm` that trains uses statistics of the global batch.

    Args:
      sync: Replicas whose statistics are taken together.
      is_synced: False to have the statistics of each replica, also of layers that name an axis.
    """

    def intercept(
        call: Callable[..., Array], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        if context.method_name != "__call__" or layer.is_initializing():
            return call(*args, **kwargs)
        if not is_synced:
            if isinstance(layer, nn.BatchNorm) or _is_copy(layer):
                _name_axis(layer, "/".join(layer.path), sync, None)
            return call(*args, **kwargs)
        if _is_registered(layer):
            return _on_all_rows(call, args, kwargs, sync)
        if _is_copy(layer):
            _give_axis(layer, "/".join(layer.path), sync)
        if not isinstance(layer, nn.BatchNorm):
            return call(*args, **kwargs)
        _name_axis(layer, "/".join(layer.path), sync, sync.axis)
        x, average, mask = _arguments(*args, **kwargs)
        average = nn.merge_param("use_running_average", layer.use_running_average, average)
        if average or layer.axis_index_groups is not None:
            return call(*args, **kwargs)
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
            layer.put_variable("batch_stats", name, _move(layer.momentum, old, new, count))
        return y

    with nn.intercept_methods(intercept):
        yield


def _is_registered(layer: Any) -> bool:
    return not _REGISTERED.isdisjoint(type(layer).__mro__)


def _on_all_rows(call: Callable[..., Any], args: Any, kwargs: Any, sync: Sync) -> Any:
    """Calls a layer with the rows of all replicas, and keeps those of this one."""
    if sync.num_replicas == 1:
        return call(*args, **kwargs)
    num = len(next(x for x in jax.tree.leaves((args, kwargs)) if jnp.ndim(x)))
    size = sync.group_size or lax.axis_size(sync.axis)

    def gather(x: Any) -> Any:
        if jnp.shape(x)[:1] != (num,):
            return x
        return lax.all_gather(x, sync.axis, axis_index_groups=sync.groups, tiled=True)

    def own(y: Any) -> Any:
        if jnp.shape(y)[:1] != (num * size,):
            return y
        return lax.dynamic_slice_in_dim(y, lax.axis_index(sync.axis) % size * num, num)

    args, kwargs = jax.tree.map(gather, (args, kwargs))
    return jax.tree.map(own, call(*args, **kwargs))


def _is_copy(layer: nn.Module) -> bool:
    """Whether this is a model library's own copy of batch norm."""
    if isinstance(layer, nn.BatchNorm) or not hasattr(layer, "axis_name"):
        return False
    kept = layer.variables.get("batch_stats", {})
    return any(not isinstance(value, Mapping) for value in kept.values())


def _give_axis(layer: Any, path: str, sync: Sync) -> None:
    _name_axis(layer, path, sync, sync.axis)
    if sync.groups is not None and getattr(layer, "axis_index_groups", None) is None:
        if not hasattr(layer, "axis_index_groups"):
            raise ConfigError(
                f"{path!r} is a batch norm of its own that knows no groups of replicas. Leave "
                "batch_norm_group_size out, or give it a field axis_index_groups."
            )
        object.__setattr__(layer, "axis_index_groups", sync.groups)


def sync_nnx(module: nnx.Module, sync: Sync, *, is_synced: bool = True) -> None:
    """Makes every `nnx.BatchNorm` inside `module` use statistics of the global batch.

    Args:
      module: The step's own copy; its batch-norm layers change class.
      sync: Replicas whose statistics are taken together.
      is_synced: False to have the statistics of each replica, also of layers that name an axis.
    """
    for path, node in nnx.iter_graph(module):
        if is_synced and _is_registered(node):
            cls: Any = type(node)
            node.__class__ = _gathering_class(cls, sync)
        elif isinstance(node, nnx.BatchNorm):
            node.__class__ = _synced_class(type(node), sync, is_synced)
        elif hasattr(node, "axis_name") and _holds_statistics(node):
            rename = _give_axis if is_synced else functools.partial(_name_axis, name=None)
            rename(node, "/".join(map(str, path)), sync)


def _holds_statistics(node: Any) -> bool:
    return any(isinstance(value, nnx.BatchStat) for value in vars(node).values())


@functools.cache
def _synced_class(cls: type[nnx.BatchNorm], sync: Sync, is_synced: bool) -> type[nnx.BatchNorm]:
    class Synced(cls):  # type: ignore[misc,valid-type]  # a base known only at run time
        def __call__(
            self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
        ) -> Array:
            average = (
                self.use_running_average if use_running_average is None else use_running_average
            )
            # Here and not before, since a model may map axes of its own.
            named = self.axis_name
            _name_axis(self, cls.__name__, sync, sync.axis if is_synced else None)
            if average or not is_synced or self.axis_index_groups is not None:
                y = super().__call__(x, use_running_average=average, mask=mask)
            else:
                y = _normalize_nnx(self, super().__call__, x, mask, sync)
            object.__setattr__(self, "axis_name", named)
            return y

    Synced.__name__, Synced.__qualname__ = cls.__name__, cls.__qualname__
    return Synced


@functools.cache
def _gathering_class(cls: Any, sync: Sync) -> type:
    class Gathering(cls):  # a base known only at run time
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _on_all_rows(super().__call__, args, kwargs, sync)

    Gathering.__name__, Gathering.__qualname__ = cls.__name__, cls.__qualname__
    return Gathering


def _normalize_nnx(
    layer: nnx.BatchNorm, call: Callable[..., Array], x: Array, mask: Array | None, sync: Sync
) -> Array:
    exact = jnp.promote_types(x.dtype, jnp.float32)
    mean, var, count = _moments(layer, x.astype(exact), mask, sync)
    running, dtype = (layer.mean[...], layer.var[...]), layer.dtype
    # A layer of low precision would round these statistics, so it computes in `exact`.
    layer.mean[...], layer.var[...], layer.dtype = mean, var, exact
    y = call(x, use_running_average=True)
    layer.mean[...] = _move(layer.momentum, running[0], mean, count)
    layer.var[...] = _move(layer.momentum, running[1], sync.kept(var, count), count)
    layer.dtype = dtype
    return y if dtype is None else y.astype(dtype)


def _arguments(
    x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
) -> tuple[Array, bool | None, Array | None]:
    return x, use_running_average, mask


def _name_axis(layer: Any, path: str, sync: Sync, name: str | None) -> None:
    """Replaces the axis that a layer names, such as that of another program's mesh."""
    is_inner = False  # of a `vmap` inside the model
    with contextlib.suppress(NameError):
        is_inner = layer.axis_name not in (None, sync.axis) and lax.axis_size(layer.axis_name) > 0
    if not is_inner:
        object.__setattr__(layer, "axis_name", name)  # a bound Linen module is frozen
    elif name is not None:
        raise ConfigError(
            f"BatchNorm {path!r} averages over axis {layer.axis_name!r}, which is mapped inside "
            "the model, and would have to average over the replicas too. Choose "
            "batch_norm='local' or 'broadcast'."
        )


def _move(momentum: float, running: Array, batch: Array, count: Array) -> Array:
    """Running statistics moved towards those of a batch; unmoved where nothing is valid."""
    # Weights, and not a choice of two results, which XLA would round otherwise where it is fused.
    old = jnp.where(count > 0, momentum, 1.0).astype(running.dtype)
    new = jnp.where(count > 0, 1 - momentum, 0.0).astype(running.dtype)
    return lax.stop_gradient(old * running + new * batch.astype(running.dtype))


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
        return mean, jnp.maximum(0.0, sums[1].real / count - _square(mean)), sums[2].real
    sums = sync.psum(jnp.stack([total(x), count.astype(x.dtype)]))
    count = jnp.maximum(sums[1].real, 1.0)
    mean = sums[0] / count
    deviations = _square(x - jnp.expand_dims(mean, dims))
    return mean, sync.psum(total(deviations)) / count, sums[1].real


def _masked_sum(x: Array, *, dims: tuple[int, ...], mask: Array | None) -> Array:
    where = None if mask is None else jnp.broadcast_to(mask, x.shape).astype(bool)
    return jnp.sum(x, dims, where=where)


def _square(x: Array) -> Float[Array, "..."]:
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def settle(old: PyTree, new: PyTree, labels: PyTree, model: Any, mask: Any = None) -> Any:
    """Synchronizes the state beside the parameters that a model has written.

    State that does not depend on a replica's rows is equal already: counts of steps, statistics of
    weights, and batch statistics of synced layers, unless they are those of groups, which are
    averaged. Per-replica state is left alone. The rest is combined as declared; else, under
    "broadcast", batch statistics become replica 0's, as with DDP's `broadcast_buffers`; with a
    mask, those of the first replica that has a valid row, and if none has, the old ones.

    Args:
      old: State before the model ran.
      new: State after it.
      labels: Label of each leaf, of `jddp.modules.varying`.
      model: The `jddp.modules.functional.FlaxModel`, for the rule of each leaf.
      mask: The mask of this replica's rows, if there is one.

    Raises:
      ConfigError: If a leaf differs per replica, and no rule is declared for it.
    """
    sync = model.sync
    source: Any = 0
    if model.batch_norm == "broadcast" and mask is not None:
        here = jnp.where((mask > 0).any(), lax.axis_index(sync.axis), lax.axis_size(sync.axis))
        source = lax.pmin(here, sync.axis)

    def agree(path: Path, before: Array, after: Array, label: int) -> Array:
        if label == EQUAL or model.keeps_own(path, after):
            return after
        kinds = model.kinds_at(path)
        if rule := sync.rule(kinds):
            return after if sync.num_shards else combine(path, rule, before, after[None], sync)
        is_statistic = not STATISTICS.isdisjoint(kinds)
        if is_statistic and model.batch_norm == "broadcast":
            is_source = lax.axis_index(sync.axis) == source
            chosen = lax.psum(jnp.where(is_source, after, 0), sync.axis)
            return jnp.where(source < lax.axis_size(sync.axis), chosen, before)
        if is_statistic and label == GROUPED:
            return lax.pmean(after, sync.axis)
        raise _undeclared(path, [*kinds, ""][0], is_statistic=is_statistic)

    return jax.tree_util.tree_map_with_path(agree, old, new, labels)


def _undeclared(path: Path, kind: str, *, is_statistic: bool) -> ConfigError:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if is_statistic:
        return ConfigError(
            f"batch_norm='sync': {name!r} is a statistic of each replica's own rows, and its layer "
            "is neither Flax's BatchNorm nor has it a field axis_name. Register the layer's class, "
            "jddp.register_batch_norm(cls), so that it sees the rows of all replicas; or choose "
            "batch_norm='local', of which jddp.verify shows how far it is from one device."
        )
    return ConfigError(
        f"state_reduction: {name!r} depends on the rows or random numbers of each replica, and no "
        f"rule is declared for {kind!r}. Declare state_reduction={{{kind!r}: 'sum'}}, 'mean' or "
        f"'first' (replica 0's); or keep one for each replica: per_replica=[{kind!r}]."
    )


def combine(path: Path, rule: str, before: Array, rows: Array, sync: Sync) -> Array:
    """Combines the values of all replicas by a rule.

    Args:
      path: Path of the leaf.
      rule: One of `REDUCTIONS`.
      before: The value before the step, equal on all.
      rows: The values of the replicas of this device, in rows; several for logical replicas.
      sync: Replicas whose values are combined.

    Raises:
      ConfigError: If the rule does not fit the dtype of the leaf.
    """
    if rule == "first":
        first: Array = lax.all_gather(rows[0], sync.axis)[0]
        return first
    if not jnp.issubdtype(rows.dtype, jnp.number if rule == "sum" else jnp.inexact):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise ConfigError(
            f"state_reduction={rule!r} does not fit {name!r} of {rows.dtype}: a mean is of "
            "floating values, a sum of numbers. Choose 'sum' or 'first'."
        )
    if rule == "sum":
        return before + sync.add(rows - before[None])
    return (sync.add(rows) / sync.num_replicas).astype(rows.dtype)
