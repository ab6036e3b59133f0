"""Synchronize batch-norm statistics over the replicas, for models that were not written for it.

Batch norm in training is batch norm in evaluation with the batch's own statistics. So a layer is
synchronized without touching the model: the layer gets mean and variance over the *global* batch as
its running statistics and normalizes with them. Then its running statistics are set again, moved by
its momentum. Sums and counts are sent, so replicas whose masks differ are weighted by their valid
rows. Each layer costs one all-reduce per direction.

    with synced_linen(sync): ...    # `linen`: the model runs inside
    sync_nnx(module, sync)          # `nnx`: changes the step's copy of a module

Model libraries carry copies of the class. A layer that keeps `batch_stats` and has a field
`axis_name` counts as such a copy, and is given the axis: it then averages over replicas by itself.
If a registered class knows no axis, its layers are called with the rows of all replicas.

This module holds what the two module systems share: which replicas are synchronized, the moments
of their rows, and the axes that layers name.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jaxtyping import Array, Float

from jddp.ground.errors import ConfigError
from jddp.ground.numbers import add_in_pairs
from jddp.ground.typing import PyTree

_REGISTERED: set[type] = set()


@dataclasses.dataclass(frozen=True)
class Sync:
    """Replicas whose batch statistics are taken together, and rules for other state.

    Attributes:
      axis: Name of the mapped axis.
      group_size: Number of neighbouring replicas that share statistics; None for all.
      unbiased: Whether the running variance takes n / (n - 1) times the batch's variance, as in
        PyTorch.
      logical_replicas: Number of logical replicas, synchronized at the end of a step; None for
        devices.
      rules: Pairs of a kind of other state, and the reduction that synchronizes it.
    """

    axis: str
    group_size: int | None = None
    unbiased: bool = False
    logical_replicas: int | None = None
    rules: tuple[tuple[str, str], ...] = ()

    def check(self, num_replicas: int) -> None:
        """Refuses a size of groups that does not divide the number of replicas.

        Raises:
          ConfigError: If there are no such groups.
        """
        if self.group_size is not None and num_replicas % self.group_size:
            sizes = [k for k in range(1, num_replicas + 1) if num_replicas % k == 0]
            raise ConfigError(
                f"batch_norm.group_size={self.group_size} does not divide {num_replicas} replicas. "
                f"Choose one of {sizes}."
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas, inside a mapped function."""
        return self.logical_replicas or jax.lax.axis_size(self.axis)

    def rule(self, kinds: Sequence[str]) -> str | None:
        """The declared rule of the first of these kinds that has one."""
        rules = dict(self.rules)
        return next((rules[kind] for kind in kinds if kind in rules), None)

    def add(self, rows: Array) -> Array:
        """Adds rows over all replicas; rows of logical replicas in one order."""
        if self.logical_replicas is None:
            return jax.lax.psum(rows[0], self.axis)
        return add_in_pairs(jax.lax.all_gather(rows, self.axis, tiled=True))

    @property
    def groups(self) -> list[list[int]] | None:
        """The replicas of each group; None for one group."""
        size = self.group_size
        if size is None:
            return None
        num_replicas = jax.lax.axis_size(self.axis)
        if size == num_replicas:
            return None
        return [list(range(first, first + size)) for first in range(0, num_replicas, size)]

    def psum(self, x: Array) -> Array:
        """Sums over the replicas of a group."""
        return jax.lax.psum(x, self.axis, axis_index_groups=self.groups)

    def kept(self, var: Array, count: Array) -> Array:
        """The variance for the running statistics, from the variance of `count` values."""
        return var * count / jnp.maximum(count - 1, 1) if self.unbiased else var


def register_batch_norm(cls: Any) -> Any:
    """Lets jddp synchronize a batch norm that is not Flax's own, under `batch_norm="sync"`.

    A layer of the class is then called with the rows of all replicas, and each replica keeps its
    own rows of the output. That is exact for any layer that needs no more than the rows. It costs
    each replica the layer's work for the global batch, and memory for its input. A field
    `axis_name`, as in Flax's own class, is cheaper and needs no registration.

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


def is_registered(layer: object) -> bool:
    """Whether its class, or a base of it, is registered."""
    return not _REGISTERED.isdisjoint(type(layer).__mro__)


def on_all_rows(
    call: Callable[..., object], args: Sequence[PyTree], kwargs: Mapping[str, PyTree], sync: Sync
) -> object:
    """Calls a layer with the rows of all replicas, and keeps this replica's results."""
    if sync.num_replicas == 1:
        return call(*args, **kwargs)
    num = len(next(x for x in jax.tree.leaves((args, kwargs)) if jnp.ndim(x)))
    size = sync.group_size or jax.lax.axis_size(sync.axis)

    def gather(x: Array) -> Array:
        if jnp.shape(x)[:1] != (num,):
            return x
        return jax.lax.all_gather(x, sync.axis, axis_index_groups=sync.groups, tiled=True)

    def own(y: Array) -> Array:
        if jnp.shape(y)[:1] != (num * size,):
            return y
        return jax.lax.dynamic_slice_in_dim(y, jax.lax.axis_index(sync.axis) % size * num, num)

    args, kwargs = jax.tree.map(gather, (args, kwargs))
    return jax.tree.map(own, call(*args, **kwargs))


def give_axis(layer: Any, path: str, sync: Sync, *, is_synced: bool) -> None:
    """Lets a model library's copy of batch norm average over replicas by itself, or not."""
    name_axis(layer, path, sync, is_synced=is_synced)
    if is_synced and sync.groups is not None and getattr(layer, "axis_index_groups", None) is None:
        if not hasattr(layer, "axis_index_groups"):
            raise ConfigError(
                f"{path!r} is a batch norm of its own that knows no groups of replicas. Leave "
                "batch_norm.group_size out, or give it a field axis_index_groups."
            )
        object.__setattr__(layer, "axis_index_groups", sync.groups)


def name_axis(layer: Any, path: str, sync: Sync, *, is_synced: bool) -> None:
    """Replaces the axis that a layer names, such as the axis of another program's mesh."""
    is_inner = False  # Whether it is an axis of a `vmap` inside the model.
    with contextlib.suppress(NameError):
        is_inner = (
            layer.axis_name not in (None, sync.axis) and jax.lax.axis_size(layer.axis_name) > 0
        )
    if not is_inner:
        # A bound Linen module is frozen.
        object.__setattr__(layer, "axis_name", sync.axis if is_synced else None)
    elif is_synced:
        raise ConfigError(
            f"BatchNorm {path!r} averages over axis {layer.axis_name!r}, which is mapped inside "
            "the model, and would have to average over the replicas too. Choose "
            "batch_norm='local' or 'broadcast'."
        )


def move(momentum: float, running: Array, batch: Array, count: Array) -> Array:
    """Moves running statistics towards the batch's statistics; leaves them if no row is valid."""
    # Both are weighted: the rounding of a choice of two results depends on how XLA fuses it.
    old = jnp.where(count > 0, momentum, 1.0).astype(running.dtype)
    new = jnp.where(count > 0, 1 - momentum, 0.0).astype(running.dtype)
    return jax.lax.stop_gradient(old * running + new * batch.astype(running.dtype))


def moments(layer: Any, x: Array, mask: Array | None, sync: Sync) -> tuple[Array, Array, Array]:
    """Mean, biased variance and count of `x`, over replicas and all dims except features.

    `use_fast_variance` is the layer's own choice: E[x^2] - E[x]^2 in one all-reduce, or the mean of
    squared deviations in a second one.
    """
    features = layer.axis if isinstance(layer.axis, Sequence) else (layer.axis,)
    kept = {feature % x.ndim for feature in features}
    dims = tuple(dim for dim in range(x.ndim) if dim not in kept)

    def total(x: Array) -> Array:
        where = None if mask is None else jnp.broadcast_to(mask, x.shape).astype(bool)
        return jnp.sum(x, dims, where=where)

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


def _square(x: Array) -> Float[Array, "..."]:
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)
