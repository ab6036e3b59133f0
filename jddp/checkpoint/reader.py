"""Reads checkpoints: onto devices, or as host arrays without the program that wrote them.

    values = read_newest(run_dir / "checkpoints", ["params", "model_state"])

A restore that resumes training needs a state of the same structure. The values are enough to
examine a finished run, on any number of devices and without the optimizer's state. No code that
the run names is called, and nothing is written: damaged checkpoints are skipped.

`restore` reads a checkpoint onto the devices of a program, whatever number of replicas has saved
it. Replicated arrays stay as they are. Per-replica arrays have a row for each replica; on another
number of replicas they start with the mean, a part of the sum, or a reset, as their layout states.
An optimizer's state may be whole or sharded, and is converted.

`arrays.json` has the shape, dtype, digest and layout of each array, by path:

    describe_arrays(tree, found, layouts)  # {"params/Dense_0/kernel": {"shape": [16, 4], ...}}

In the file a layout is "replicated", {"per_replica": "mean"} (or "sum", "reset": its rule for
another number of replicas) or {"sharded": [16, 4]} (the whole shape).

Orbax and TensorStore print errors that jddp reports in one line: `keep_quiet` hides them.
"""

import contextlib
import functools
import json
import logging
import math
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict

from jddp.checkpoint.folders import find_damage, finished, first_line
from jddp.engine.digest import Found, as_words, digests
from jddp.engine.evaluation import optimizer_params, read_in_evaluation
from jddp.engine.mesh import OnMesh, in_a_row, make_mesh, mesh_of, replicate, replicated, sharded
from jddp.engine.state import Layout, PerReplica, Replicated, Sharded, TrainState, by_path, merged
from jddp.ground.errors import ConfigError, FileSystemError, printable
from jddp.ground.typing import JsonObject, PyTree
from jddp.modules.base import thaw
from jddp.reduce.shards import Shape

Layouts = Mapping[str, Layout]  # The layout of each array, by path.
# Implementations of PRNG keys, by the names of their dtypes.
KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def describe_arrays(tree: PyTree, found: Found, layouts: Layouts) -> dict[str, JsonObject]:
    """Describes every array.

    Args:
      tree: Arrays, or their shapes and shardings.
      found: Digests from `jddp.engine.digest`.
      layouts: Layouts by path.
    """
    words = as_words(found, tree)
    return {
        name: dict(shape=[*x.shape], dtype=str(x.dtype), digest=word, layout=layouts[name])
        for (name, x), word in zip(by_path(tree).items(), words, strict=True)
    }


def find_altered(arrays: PyTree, described: dict[str, JsonObject]) -> str | None:
    """Names an array on the devices that differs from its description; None if none does."""
    found = describe_arrays(arrays, digests(arrays), layouts_in(described))
    differ = [name for name in {**described, **found} if described.get(name) != found.get(name)]
    return f"{differ[0]} is not the array that was saved" if differ else None


def layouts_in(described: dict[str, JsonObject]) -> Layouts:
    """The layouts that a checkpoint has recorded."""
    return {name: about["layout"] for name, about in described.items()}


def in_file(layout: Layout) -> object:
    """A layout as JSON."""
    match layout:
        case PerReplica(rule):
            return {"per_replica": rule}
        case Sharded(whole):
            return {"sharded": whole}
        # A divided array has the same shape on any number of devices: it is read in any layout.
        case Layout():
            return "replicated"
    raise TypeError(f"{layout} is no layout")


def from_file(entries: JsonObject) -> dict[str, JsonObject]:
    """The entries of the file with their layouts.

    Raises:
      LookupError: If an entry lacks its layout.
      TypeError: If an entry is no object.
      ValueError: If a layout is unknown.
    """
    return {
        name: {**about, "layout": _layout_of(about["layout"])} for name, about in entries.items()
    }


def _layout_of(words: object) -> Layout:
    match words:
        case "replicated":
            return Replicated()
        case {"per_replica": "mean" | "sum" | "reset" as rule}:
            return PerReplica(rule)
        case {"sharded": [*whole]}:
            return Sharded(tuple(whole))
    raise ValueError(f"{reprlib.repr(words)} is no layout")


def as_saved(words: jax.Array, dtype: str) -> jax.Array:
    """Makes PRNG keys of numbers in a file if `dtype` names keys; returns others unchanged."""
    impl = KEY_IMPLS.get(dtype)
    return words if impl is None else jax.random.wrap_key_data(words, impl=impl)


# If several reads or writes fail, the first error is raised. Asyncio would print the others. Python
# would print errors that TensorStore reports later, to a loop that orbax has closed.
_REFUSED = re.compile("os_error_code=|'(OS|FileNotFound)Error'")
_LATE = "Event loop is closed"


@functools.cache
def keep_quiet() -> None:
    """Hides errors of orbax and TensorStore that jddp reports."""
    logging.getLogger("absl").addFilter(_is_worth_showing)
    logging.getLogger("asyncio").addFilter(lambda x: not _REFUSED.search(str(x.exc_info)))
    show = sys.unraisablehook
    sys.unraisablehook = lambda x: show(x) if x.object or str(x.exc_value) != _LATE else None
    # After an error, Python warns of a coroutine that orbax has made and not begun.
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host")


def _is_worth_showing(record: logging.LogRecord) -> bool:
    # Orbax writes some hundred lines a checkpoint to absl's log; a run has its own lines.
    is_error = record.levelno >= logging.ERROR and not record.exc_info
    return is_error or "orbax" not in Path(record.pathname).parts


PARAMETERS = {"params", "ema_params"}


def read_newest(directory: Path, fields: Sequence[str]) -> dict[str, PyTree]:
    """Returns fields of the newest state in `directory` with valid digests.

    Raises:
      FileSystemError: If there is no such checkpoint, or it cannot be read.
    """
    return read_values(directory / str(newest_sound(directory)), fields)


def read_values(folder: Path, fields: Sequence[str]) -> dict[str, PyTree]:
    """Returns fields of the state in one checkpoint as they are evaluated, in nested dicts.

    Per-replica arrays (parameters under `LocalSteps`, or statistics) are averaged. Parameters are
    the ones that the optimizer evaluates. All keys are strings, even if the state had numbers.

    Raises:
      FileSystemError: If it cannot be read.
    """
    described = read_described(folder)
    of_optimizer = [name for name in described if name.startswith("opt_state/")]
    names = read_in_evaluation(of_optimizer) if "params" in fields else ()
    leaves = read_arrays(folder, [*fields, *names])
    layouts = layouts_in(described)
    values = {name: merged(x, layouts[name]) for name, x in leaves.items()}
    kept = {name: values.pop(name) for name in names}
    found = {field: {} for field in fields} | unflatten_dict(values, sep="/")
    if kept:
        found["params"] = optimizer_params(found["params"], kept)
    if "model_state" in found:  # It also has the parameters that were not trained.
        kept = found["model_state"]
        whole = {name: thaw(x, kept)[0] for name, x in found.items() if name in PARAMETERS and x}
        found |= whole | {"model_state": thaw({}, kept)[1]}
    return found


def newest_sound(directory: Path) -> int:
    """The newest step with undamaged files.

    Raises:
      FileSystemError: If there is none.
    """

    def skip(step: int, damage: str) -> None:
        logging.getLogger("jddp").error("%s is skipped: %s.", directory / str(step), damage)

    if not finished(directory):
        raise FileSystemError(f"{directory} holds no finished checkpoint. Train first.")
    if (step := find_newest(directory, skip)) is None:
        raise FileSystemError(f"{directory} holds no undamaged checkpoint.")
    return step


def find_newest(directory: Path, on_damage: Callable[[int, str], None]) -> int | None:
    """The newest step with undamaged files, or None; calls `on_damage` for each newer step.

    Args:
      directory: Directory of the checkpoints.
      on_damage: Function that gets the step of a damaged checkpoint, and words for the damage.
    """
    for step in reversed(finished(directory)):
        try:
            if (damage := find_fault(directory / str(step))) is None:
                return step
        except FileSystemError as error:
            damage = str(error)
        if not (directory / str(step)).exists():  # A run has removed it, and named a newer one.
            return find_newest(directory, on_damage)
        on_damage(step, damage)
    return None


def find_fault(folder: Path) -> str | None:
    """Describes the damage of a checkpoint: a changed file, or the number of another step.

    Raises:
      FileSystemError: If `run.json` holds no object.
    """
    if (damage := find_damage(folder)) is not None:
        return damage
    step = read_object(folder / "run.json").get("step")
    return None if str(step) == folder.name else f"it was saved as step {step}"


def read_arrays(folder: Path, fields: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns fields of the state in one checkpoint: numpy arrays, and JAX's PRNG keys, by path.

    Args:
      folder: Folder of the checkpoint.
      fields: Fields of the state, or paths; None for all.

    Raises:
      FileSystemError: If it cannot be read.
    """
    keep_quiet()
    state = epath.Path(folder.absolute()) / "state"
    described = read_described(folder)
    try:
        chosen = [n for n in described if fields is None or {n, n.partition("/")[0]} & {*fields}]
        forms = {n: (described[n]["shape"], described[n]["dtype"]) for n in chosen}
        # Orbax writes no files for arrays without elements.
        empty = {n: np.zeros(*form) for n, form in forms.items() if 0 in form[0]}
        as_numpy = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in chosen if n not in empty}
        names = dict.fromkeys(as_numpy, 0)
        arguments = ocp.args.PyTreeRestore(names, restore_args=as_numpy, partial_restore=True)
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            arrays = empty | handler.restore(state, args=arguments)
        return {name: as_saved(arrays[name], described[name]["dtype"]) for name in chosen}
    except Exception as error:  # Orbax raises anything for foreign files.
        raise FileSystemError(f"{state} cannot be read: {first_line(error)}") from error


def read_described(folder: Path) -> dict[str, JsonObject]:
    """The description of a checkpoint's arrays, as made by `describe_arrays`.

    Raises:
      FileSystemError: If the file describes no arrays.
    """
    path = folder / "arrays.json"
    try:
        return from_file(read_object(path))
    except (LookupError, TypeError, ValueError) as error:
        raise FileSystemError(f"{path} describes no arrays: {error!r}.") from error


def read_object(path: Path) -> JsonObject:
    """The object in a JSON file.

    Raises:
      FileSystemError: If the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise FileSystemError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise FileSystemError(f"{path} is no JSON object.")
    return values


def checkpoint_lines(directory: Path) -> Iterator[str]:
    """A line for each checkpoint, damaged ones included: step, size, last metrics."""

    def by_step(folder: Path) -> tuple[int, str]:
        step, _, rest = folder.name.partition(".")
        return (int(step) if step.isdecimal() else 0, rest)

    for folder in sorted(filter(Path.is_dir, directory.iterdir()), key=by_step):
        with contextlib.suppress(FileNotFoundError):  # A run may remove it now.
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            line = f"{folder.name:>12}  {size / 2**20:10.1f} MiB  {_last_metrics(folder)}"
            yield printable(line.rstrip())


def _last_metrics(folder: Path) -> str:
    try:
        run = read_object(folder / "run.json")
        last = run["evaluations"][-1] if run.get("evaluations") else run.get("metrics", {})
        numbers = {name: x for name, x in last.items() if isinstance(x, int | float)}
    except (FileSystemError, AttributeError, LookupError, TypeError):
        return "not readable"
    return "  ".join(f"{name} {x:.4g}" for name, x in numbers.items() if name != "step")


def find_any_damage(folder: Path) -> str | None:
    """Describes the first file or array of a checkpoint that has changed; None if there is none."""
    try:
        if (fault := find_fault(folder)) is not None:
            return fault
        described = read_described(folder)
        arrays = replicate(read_arrays(folder), make_mesh(1))
    except FileSystemError as error:
        return str(error)
    return find_altered(arrays, described)


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


class Saved(NamedTuple):
    """A state that was saved, before it is read.

    Attributes:
      step: Number of finished optimizer steps.
      place: Name of its place, for errors.
      described: Description of its arrays.
      beside: The run data.
      read: Function that reads arrays onto the devices, by shapes and shardings.
    """

    step: int
    place: str
    described: dict[str, JsonObject]
    beside: JsonObject
    read: Callable[[Mapping[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]


First = Callable[[], TrainState]  # Makes the first state.


def restore(
    folder: Path, like: TrainState, layouts: TrainState | None, first: First | None = None
) -> Restored:
    """Reads a checkpoint.

    Args:
      folder: Folder of the checkpoint, whose name is its step.
      like: State, or its shapes and shardings, to restore to.
      layouts: Layouts of its leaves; None if all are replicated.
      first: Function that makes the first state, from which arrays start that are reset; `like` has
        their values by default.

    Raises:
      ConfigError: If it is from another model or optimizer than `like`.
      Damaged: If an array has changed.
      FileSystemError: If it cannot be read.
    """

    def read(target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            given = ocp.args.StandardRestore(dict(target))
            arrays: dict[str, jax.Array] = handler.restore(epath.Path(folder / "state"), args=given)
        return arrays

    described, beside = read_described(folder), read_object(folder / "run.json")
    saved = Saved(int(folder.name), str(folder.parent), described, beside, read)
    return put_on_devices(saved, like, layouts, first)


def put_on_devices(
    saved: Saved, like: TrainState, layouts: TrainState | None, first: First | None = None
) -> Restored:
    """Reads a state onto the devices of a program, as `restore` does."""
    whole, here = by_path(like), layouts_of(like, layouts)
    described, there = saved.described, layouts_in(saved.described)
    # An earlier version averaged only the parameters, and saved no `ema_state`.
    wanted = {n: x for n, x in whole.items() if n in described or not n.startswith("ema_state/")}
    try:
        if differ := difference(described, wanted, there, here):
            raise ConfigError(
                f"{saved.place}: step {saved.step} is from another model, optimizer or mesh. "
                f"Choose another directory, or resume with the job that saved it:\n{differ}"
            )
        target = {n: _to_read(described[n]["shape"], there[n], x) for n, x in wanted.items()}
        arrays = saved.read({n: x for n, x in target.items() if x.size})
        # Arrays without elements are in no file: orbax refuses them.
        empty = {n: x for n, x in target.items() if not x.size}
        arrays |= {n: jnp.zeros_like(x, device=x.sharding) for n, x in empty.items()}
    except (ConfigError, FileSystemError):
        raise
    except Exception as error:  # Orbax raises anything for foreign files.
        raise FileSystemError(
            f"{saved.place} cannot be read at step {saved.step}: {first_line(error)}"
        ) from error
    if damage := find_altered(arrays, described):
        raise Damaged(damage)
    placed = {n: _on_this_mesh(arrays[n], x, there[n]) for n, x in wanted.items()}
    is_reset = any(x is None for x in placed.values())
    begins = by_path(first()) if first and is_reset else whole
    found = {n: begins[n] if x is None else x for n, x in placed.items()}
    if begun := whole.keys() - found.keys():
        raw = {n: found[n.replace("ema", "model", 1)] for n in begun}
        found |= {n: jnp.array(x, whole[n].dtype) for n, x in raw.items()}
    state = jax.tree.unflatten(jax.tree.structure(like), [found[n] for n in whole])
    beside = {name: x for name, x in saved.beside.items() if name != "step"}
    return Restored(saved.step, state, beside)


def layouts_of(state: TrainState, layouts: TrainState | None) -> Layouts:
    """Layouts by path; None stands for replicated leaves."""
    return by_path(jax.tree.map(lambda _: Replicated(), state) if layouts is None else layouts)


def _to_read(shape: Sequence[int], layout: Layout, want: OnMesh) -> jax.ShapeDtypeStruct:
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


def _on_this_mesh(x: jax.Array, want: OnMesh, layout: Layout) -> jax.Array | None:
    """An array that was saved in a layout, in the shape and sharding wanted here; None if reset."""
    if x.shape == want.shape or layout == PerReplica("reset"):
        return x if x.shape == want.shape else None
    if not layout.is_per_replica:
        size = math.prod(layout.one_device_shape(x.shape))
        return _cut_again(size, want.shape, want.sharding)(x)
    is_sum = layout == PerReplica("sum")
    row = (x.sum(0) / want.shape[0]).astype(x.dtype) if is_sum else merged(x, layout)
    return jax.device_put(jnp.broadcast_to(row, want.shape), want.sharding)


@functools.lru_cache(maxsize=64)
def _cut_again(size: int, shape: Shape, sharding: jax.NamedSharding) -> jax.stages.Wrapped:
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
    described: dict[str, JsonObject], wanted: Mapping[str, OnMesh], there: Layouts, here: Layouts
) -> str:
    """The paths at which two sets of arrays differ on a device, one a line; empty if none differ.

    Args:
      described: Description of the checkpoint.
      wanted: Arrays of the program, or their shapes.
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
