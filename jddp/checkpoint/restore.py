"""Reads a checkpoint onto the devices of a program, whatever number of replicas has saved it.

Replicated arrays stay as they are. Per-replica arrays have a row for each replica; on another
number of replicas they start with the mean, a part of the sum, or a reset, as their layout states.
An optimizer's state may be whole or sharded, and is converted.
"""

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding
from jax.stages import Wrapped

from jddp.checkpoint.folders import first_line
from jddp.checkpoint.reader import Layouts, find_altered, layouts_in, read_described, read_object
from jddp.engine.mesh import in_a_row, mesh_of, replicated, sharded
from jddp.engine.state import Layout, PerReplica, Replicated, TrainState, by_path, merged
from jddp.ground.errors import ConfigError, FileSystemError
from jddp.ground.typing import JsonObject
from jddp.reduce.shards import Shape

MOST_PATHS = 20  # Limit of the arrays that an error names.


class Restored(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
      step: Number of finished optimizer steps.
      state: The training state, on the devices.
      beside: The run data.
    """

    step: int
    state: TrainState
    beside: JsonObject


class Damaged(Exception):
    """An array is not the one that was saved; the text names it."""


def restore(folder: Path, like: TrainState, layouts: TrainState | None) -> Restored:
    """Reads a checkpoint.

    Args:
      folder: Folder of the checkpoint, whose name is its step.
      like: State with the structure, shapes and shardings to restore to.
      layouts: Layouts of its leaves; None if all are replicated.

    Raises:
      ConfigError: If it is from another model or optimizer than `like`.
      Damaged: If an array has changed.
      FileSystemError: If it cannot be read.
    """
    whole, here = by_path(like), layouts_of(like, layouts)
    try:
        described = read_described(folder)
        # An earlier version averaged only the parameters, and saved no `ema_state`.
        wanted = {
            n: x for n, x in whole.items() if n in described or not n.startswith("ema_state/")
        }
        beside = read_object(folder / "run.json")
        there = layouts_in(described)
        if differ := difference(described, wanted, there, here):
            raise ConfigError(
                f"{folder.parent}: step {folder.name} is from another model, optimizer or mesh. "
                f"Choose another directory, or resume with the job that saved it:\n{differ}"
            )
        target = {n: _to_read(described[n]["shape"], there[n], x) for n, x in wanted.items()}
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            given = ocp.args.StandardRestore({n: x for n, x in target.items() if x.size})
            arrays = handler.restore(epath.Path(folder / "state"), args=given)
        # Arrays without elements are in no file: orbax refuses them.
        empty = {n: x for n, x in target.items() if not x.size}
        arrays |= {n: jnp.zeros_like(x, device=x.sharding) for n, x in empty.items()}
    except (ConfigError, FileSystemError):
        raise
    except Exception as error:  # Orbax raises anything for foreign files.
        raise FileSystemError(
            f"{folder.parent} cannot be read at step {folder.name}: {first_line(error)}"
        ) from error
    if damage := find_altered(arrays, described):
        raise Damaged(damage)
    del beside["step"]
    found = {n: _on_this_mesh(arrays[n], x, there[n]) for n, x in wanted.items()}
    if begun := whole.keys() - found.keys():
        raw = {n: found[n.replace("ema", "model", 1)] for n in begun}
        found |= {n: jnp.array(x, whole[n].dtype) for n, x in raw.items()}
    state = jax.tree.unflatten(jax.tree.structure(like), [found[n] for n in whole])
    return Restored(int(folder.name), state, beside)


def layouts_of(state: TrainState, layouts: TrainState | None) -> Layouts:
    """Layouts by path; None stands for replicated leaves."""
    return by_path(jax.tree.map(lambda _: Replicated(), state) if layouts is None else layouts)


def _to_read(shape: Sequence[int], layout: Layout, want: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and sharding for reading an array, which may have been saved on another mesh."""
    mesh = in_a_row(mesh_of(want))
    sharding = want.sharding
    if tuple(shape) != want.shape:
        fits = not layout.is_per_replica and shape and shape[0] % mesh.size == 0
        sharding = sharded(mesh) if fits else replicated(mesh)
    read = jax.ShapeDtypeStruct(shape, want.dtype)  # Orbax makes keys of the words that it reads.
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        read = jax.eval_shape(jax.random.key_data, read)
    return jax.ShapeDtypeStruct(read.shape, read.dtype, sharding=sharding)


def _on_this_mesh(x: jax.Array, want: jax.Array, layout: Layout) -> jax.Array:
    """Converts an array that was saved in a layout to the shape and sharding wanted here."""
    if x.shape == want.shape or layout == PerReplica("reset"):
        return x if x.shape == want.shape else want
    if not layout.is_per_replica:
        size = math.prod(layout.one_device_shape(x.shape))
        return _cut_again(size, want.shape, want.sharding)(x)
    is_sum = layout == PerReplica("sum")
    row = (x.sum(0) / want.shape[0]).astype(x.dtype) if is_sum else merged(x, layout)
    return jax.device_put(jnp.broadcast_to(row, want.shape), want.sharding)


@functools.lru_cache(maxsize=64)
def _cut_again(size: int, shape: Shape, sharding: NamedSharding) -> Wrapped:
    """Converts an array of `size` elements, whole or sharded, to a shape padded with zeros."""

    def again(x: jax.Array) -> jax.Array:
        flat = x.ravel()[:size]
        return jnp.pad(flat, (0, math.prod(shape) - size)).reshape(shape)

    return jax.jit(again, out_shardings=sharding)


def _on_one_device(shape: Sequence[int], dtype: object, layout: Layout) -> str:
    """Shape and dtype of an array on one device, equal for any number of devices."""
    rule = f" per replica ({layout.on_resize})" if isinstance(layout, PerReplica) else ""
    return f"{layout.one_device_shape(tuple(shape))} {dtype}{rule}"


def difference(
    described: dict[str, JsonObject], wanted: Mapping[str, jax.Array], there: Layouts, here: Layouts
) -> str:
    """The paths at which two sets of arrays differ on a device, one a line; empty if none differ.

    Args:
      described: Description of the checkpoint.
      wanted: Arrays of the program.
      there: Layouts of the checkpoint.
      here: Layouts of the program.
    """
    saved = {n: _on_one_device(x["shape"], x["dtype"], there[n]) for n, x in described.items()}
    own = {n: _on_one_device(x.shape, x.dtype, here[n]) for n, x in wanted.items()}
    names = sorted({*saved, *own}, key=lambda name: (not name.startswith("params"), name))
    # A scalar of an optimizer is an array of one entry where the optimizer updates shards.
    one = ("() ", "(1,) ")
    differ = [n for n in names if saved.get(n, "").replace(*one) != own.get(n, "").replace(*one)]
    lines = [
        f"  {n}: {saved.get(n, 'absent')} there, {own.get(n, 'absent')} here"
        for n in differ[:MOST_PATHS]
    ]
    if len(differ) > MOST_PATHS:
        lines.append(f"  and {len(differ) - MOST_PATHS} more")
    return "\n".join(lines)
