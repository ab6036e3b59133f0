"""Builds a job from a config: joins its processes, resolves names, makes the mesh, reads the data.

job = build(config)
run = job.run()

with fast_dev_run(config) as short:    # a few steps of every phase of a job, and keeps nothing
build(short).run()
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jddp.config.files import flatten, load_config, with_overrides
from jddp.config.permissions import expand, is_url
from jddp.config.schema import Config
from jddp.config.versions import source_hash, versions
from jddp.data import DataSet
from jddp.data.source import Streams
from jddp.distributed.coordination import agree, from_first, process_index
from jddp.distributed.gpus import ON_PURPOSE, gpu_facts, small_shared_memory
from jddp.distributed.identity import resolve_identity
from jddp.distributed.join import configure_devices, initialize, require_devices
from jddp.engine.data_parallel import DataParallel
from jddp.engine.mesh import make_mesh
from jddp.ground.errors import ConfigError, DataError, file_errors, report
from jddp.ground.typing import Settings
from jddp.inspection.layers import num_outputs
from jddp.trainer.job.data import (
    OfStream,
    check_first,
    open_data,
)
from jddp.trainer.job.job import Job
from jddp.trainer.job.parts import num_classes_of, num_steps_of, optimizer_of, resolve_parts
from jddp.trainer.prefetch import Source
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.run import Callback, Run

# Options of JAX that change the results of a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
# Keys of a short trial.
SHORT: Settings = {
    "train.num_steps": 3,
    "train.num_epochs": None,
    "train.log_every_steps": 1,
    "train.eval_every_steps": 2,
    "train.eval_every_epochs": None,
    "train.limit_eval_batches": 2,
    "checkpoint.every_steps": None,
    "checkpoint.every_epochs": None,
    "checkpoint.resume": "auto",
    "report.sinks": [],  # Sinks may keep records elsewhere.
}
SECONDS = 600.0  # Limit for process 0 to make the folder.


def train(
    config: Config | str | Path, *, callbacks: Sequence[Callback] = (), **overrides: Any
) -> Run:
    """Trains a model as a config describes: the command line as a function.

    Args:
      config: A config, a YAML file or the name of a preset.
      callbacks: Callbacks, which get reduced values during the run.
      **overrides: Sections, `model={"name": "mlp"}`, or dotted keys, `**{"model.name": "mlp"}`.

    Returns:
      The finished run. A `Config` without `run.dir` leaves nothing on disk.

    Raises:
      Error: A subclass for each kind of mistake, where possible before anything is compiled.
    """
    if isinstance(config, Config):
        resolved = with_overrides(config, overrides)
    else:
        resolved, _ = load_config([str(config)], overrides)
    if resolved.run.dir is not None:  # Checked before the data are read.
        RunDirectory(resolved.run.dir, is_writer=True).check_usable()
    return build(resolved).run(callbacks)


def build(config: Config, *, needs_data: bool = True, mesh: Mesh | None = None) -> Job:
    """Makes a job: joins the processes, resolves names, makes the mesh, reads the data.

    Args:
      config: Config of the job.
      needs_data: Whether absent data are an error. A preview needs none.
      mesh: Devices to compile for, instead of the devices that the config names.

    Raises:
      ConfigError: With all names of the config that cannot be resolved, one line each.
      DataError: If the data are absent or damaged.
      DeviceError: If JAX finds no device.
      ProcessMismatchError: If processes have different configs, versions or data.
    """
    folder = Path.cwd()
    join(config, config.mesh.num_devices)
    parts = resolve_parts(config)
    config = parts.config
    data = None
    data_error = ""
    num_classes = 0
    try:
        data = open_data(parts.source, config)
    except DataError as error:
        if needs_data or not parts.source.spec:  # Without data a stream has no shapes.
            raise
        data_error = str(error)
    num_steps = config.train.num_steps
    if isinstance(data, DataSet):
        agree("data set", {"sha256": data.sha256})
        num_classes = num_classes_of(config, data)
        num_steps = num_steps_of(config, len(data.train))
    optimizer, learning_rate = optimizer_of(config, num_steps or 1)
    num_devices = None if config.mesh.num_devices == "auto" else config.mesh.num_devices
    mesh = make_mesh(mesh or num_devices, config.mesh.axis_name)
    options = {"mesh": mesh, "eval_fn": parts.eval_fn, **parts.ddp_options}
    ddp = DataParallel(parts.model, optimizer, parts.loss_fn, **options)
    stream = None
    if isinstance(data, Streams):
        stream = Source(data.train, ddp.shard_batch, OfStream(config))
        check_first(config, stream.peek())
    job = Job(config, parts, ddp, num_steps, learning_rate, data, data_error, folder, stream)
    if config.loss.name in ("cross_entropy", "next_token"):
        _check_outputs(job, num_classes)
    return job


def _check_outputs(job: Job, num_classes: int) -> None:
    """Compares the model's outputs with the classes, or the vocabulary, of the data."""
    known = job.parts.source.sizes
    outputs = num_outputs(job.ddp, job.batch_spec)
    for name, size in (known or {"num_classes": num_classes}).items():
        mismatch = f"model: it has {outputs} outputs, and {name} of the data is {size}."
        if outputs is not None and outputs < size:
            raise ConfigError(f"{mismatch} Set model.kwargs.{name}={size}.")
        if outputs is not None and outputs > size and known and job.is_writer:
            logging.getLogger("jddp").warning("%s The additional outputs learn nothing.", mismatch)


def join(config: Config, num_devices: int | str) -> None:
    """Joins the processes of a job, compares their configs, and starts their devices.

    Args:
      config: Config of the job.
      num_devices: Number of devices of all processes, or "auto".

    Raises:
      ConfigError: If the devices do not divide over the processes.
      DeviceError: If JAX finds no device.
      ProcessMismatchError: If processes have different configs or versions.
    """
    identity = resolve_identity()
    # A running JAX, as in a notebook, refuses: then the mesh takes some of its devices.
    with contextlib.suppress(RuntimeError):
        configure_devices(num_devices, num_processes=identity.num_processes)
    initialize(identity)
    agree("config or version", _facts(config))
    missing = require_devices()
    if process_index() != 0:
        return
    if missing is not None:
        report(f"JAX runs on CPUs. {missing} {ON_PURPOSE}")
    elif jax.default_backend() == "gpu" and jax.device_count() > 1:
        small = small_shared_memory(jax.local_device_count())
        if small is not None:
            report(str(small))


def _facts(config: Config) -> dict[str, str]:
    """Values that all processes of a job must share; the folder of the data may differ."""
    keys = {key: str(x) for key, x in flatten(config.model_dump()).items() if key != "data.dir"}
    settings = {name: str(getattr(jax.config, name)) for name in SETTINGS}
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "JAX_PLATFORMS")}
    flags["code of jddp"] = source_hash()
    return {**gpu_facts(os.environ), **keys, **versions(), **settings, **flags}


@contextlib.contextmanager
def fast_dev_run(config: Config) -> Iterator[Config]:
    """The config of a short trial, in a run directory that is removed when the block ends.

    It takes 3 steps, evaluates 2 batches after the second and the last, and saves at the end. The
    directory is next to `run.dir`, where the run itself would write; for a URL it is in the working
    directory. Sinks get nothing. Every process of a job calls it, when they are connected.

    Raises:
      FileSystemError: If the directory cannot be made.
    """
    made = ""
    if process_index() == 0:
        # Next to the run directory, in the nearest folder that exists.
        run_dir = config.run.dir or ""
        path = Path("run") if is_url(run_dir) else expand(run_dir)
        beside = next(folder for folder in path.absolute().parents if folder.is_dir())
        with file_errors(f"{beside} cannot be written"):
            made = tempfile.mkdtemp(prefix=".fast-dev-run-", dir=beside)
    folder = from_first("fast-dev-run", made, timeout_seconds=SECONDS)
    try:
        yield with_overrides(config, {**SHORT, "run.dir": folder})
    finally:
        if process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            report("fast dev run: nothing of it was kept")
