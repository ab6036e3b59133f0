"""Builds a job from a config: joins its processes, resolves names, makes the mesh, reads the data.

job = build(config)
run = job.run()
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jddp.config.files import flatten, load_config, with_overrides
from jddp.config.schema import Config
from jddp.config.versions import source_hash, versions
from jddp.data import DataSet, Order, TrainBatches, WorkerBatches, eval_batches, load_weights
from jddp.data.order import ExampleOrder
from jddp.data.source import Streams
from jddp.data.transforms import normalization_of
from jddp.distributed.coordination import agree, process_index
from jddp.distributed.gpus import ON_PURPOSE, gpu_facts
from jddp.distributed.identity import resolve_identity
from jddp.distributed.join import configure_devices, initialize, require_devices
from jddp.distributed.watchdog import Limits
from jddp.engine.data_parallel import DataParallel
from jddp.engine.initial_state import Misfit
from jddp.engine.mesh import count_processes, make_mesh
from jddp.engine.state import TrainState
from jddp.ground.errors import ConfigError, DataError, report
from jddp.ground.files import absolute, folder_or_url
from jddp.ground.names import OPTIONS, find
from jddp.ground.typing import Batch, Batches, JsonObject
from jddp.inspection.layers import num_outputs
from jddp.inspection.verification.findings import Verification
from jddp.inspection.verification.verify import verify
from jddp.modules.rows import as_arrays
from jddp.trainer.fit import start
from jddp.trainer.job.data import OfStream, check_first, listed_transforms, open_data
from jddp.trainer.job.parts import (
    Parts,
    Schedule,
    make_callbacks,
    num_classes_of,
    num_steps_of,
    optimizer_of,
    period_of,
    resolve_parts,
)
from jddp.trainer.prefetch import Source
from jddp.trainer.reports.run_directory import RunDirectory
from jddp.trainer.run import Callback, Checks, Evaluation, Keep, Options, Run

# Options of JAX that change the results of a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")


@dataclass(frozen=True)
class Job:
    """All objects of a run, made and checked.

    Attributes:
      config: Config that it was made from.
      parts: Objects that the config names.
      ddp: The model on its mesh.
      num_steps: Total number of optimizer steps; None if it depends on data that are absent.
      learning_rate: The schedule, or None if the optimizer has its own.
      data: The examples, or None if they are absent and were not needed.
      data_error: Reason for their absence.
      folder: Working directory when the job was built; relative paths belong to it.
      stream: The training batches, where the data are streams; None where they are examples.
    """

    config: Config
    parts: Parts
    ddp: DataParallel
    num_steps: int | None
    learning_rate: Schedule | None
    data: DataSet | Streams | None
    data_error: str = ""
    folder: Path | None = None
    stream: Source | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process prints and writes."""
        return jax.process_index() == 0

    @functools.cached_property
    def batch_spec(self) -> Batch:
        """The shapes of one batch of this process, read from the first example if there is one."""
        if self.stream is not None:
            return jax.eval_shape(lambda x: x, self.stream.peek())
        size = self.config.data.global_batch_size
        num_parts = self.ddp.steps.rows.num_micro_batches
        in_all = -(-size // num_parts) * num_parts
        rows = in_all // count_processes(self.ddp.mesh)
        if self.data is not None:
            example = as_arrays(self.plain_batches().example)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), example
            )
        spec = self.parts.source.spec
        if in_all > size:
            spec = {"mask": ((), np.dtype("float32")), **spec}
        return {n: jax.ShapeDtypeStruct((rows, *dims), dtype) for n, (dims, dtype) in spec.items()}

    def run(self, callbacks: Sequence[Callback] = ()) -> Run:
        """Trains to the end, resuming from the newest checkpoint if there is one."""
        assert self.data is not None, "build(config) has data unless needs_data=False"
        config = self.config
        train, saved = config.train, config.checkpoint
        place, own = config.run.dir, make_callbacks(config)
        with contextlib.closing(self.train_batches()) as batches:
            state = self.first_state()
            options = Options(
                num_steps=train.num_steps,
                num_epochs=train.num_epochs,
                log_every_steps=train.log_every_steps,
                eval_every_steps=period_of(train, "eval_"),
                save_every_steps=period_of(saved),
                keep=Keep(saved.keep, saved.keep_every_steps, saved.memory_every_steps),
                resume=config.checkpoint.resume,
                evaluation=Evaluation(
                    test_batches(config, self.data), train.eval_params, train.limit_eval_batches
                ),
                learning_rate=self.learning_rate and jax.jit(self.learning_rate),
                checks=Checks(
                    replicas_every_steps=train.check_replicas_every_steps,
                    replay_every_steps=train.replay_every_steps,
                    max_consecutive_skips=train.max_consecutive_skips,
                    on_spike=train.on_spike,
                    limits=Limits(step_seconds=config.watchdog.step_seconds),
                ),
                profile_steps=train.profile_steps,
                seed=config.seed,
                run_dir=place and folder_or_url(place, folder=self.folder),
                config=config.model_dump(),
                facts=self._facts(),
                callbacks=[*own, *callbacks],
                sinks=self.parts.sinks,
            )
            return start(self.ddp, batches, options, state)

    def first_state(self) -> Callable[[Batch], TrainState] | None:
        """Function that makes the state of a new run from its first batch; None for `ddp.init`.

        Raises:
          ConfigError: If the initial weights do not exist.
        """
        named = self.config.model.init_from
        if named is None:
            return None
        path = absolute(named, folder=self.folder)
        if not path.exists():
            raise ConfigError(f"model.init_from: {named} does not exist. Name a file or folder.")
        return functools.partial(self._init_from_weights, path)

    def _init_from_weights(self, path: Path, batch: Batch) -> TrainState:
        """The first state, whose parameters are read from a file or a run."""
        model, seed = self.config.model, self.config.seed
        partial = model.weights_partial
        try:
            read = find(OPTIONS, "init-from")  # It knows the names of other libraries.
            given, library = read(path, self.parts.model, partial=partial) if read else (path, "")
            state = self.ddp.init(seed, batch, given, partial=partial)
        except Misfit as error:
            raise ConfigError(
                f"model.init_from: {model.init_from} does not fit the model at {error.where}. With "
                "model.weights_partial=true the model keeps its own there."
            ) from error
        if self.is_writer:
            names = f", by the names of {library}" if library else ""
            counts = "" if partial else f": {self.ddp.loaded}"  # If partial, a warning has them.
            report(f"started from {model.init_from}{names}{counts}")
        return state

    def verify(self) -> Verification:
        """Compares a step on the mesh with a step on a single device, for the first batch.

        The learning rate is the peak of the schedule: a warm-up begins at 0, where no parameter
        moves.

        Raises:
          UsageError: If there is no second device.
        """
        optimizer, _ = optimizer_of(self.config, self.num_steps or 1, at_peak=True)
        with contextlib.closing(self.train_batches()) as batches:
            batch = batches.peek() if isinstance(batches, Source) else batches.batch(0)
        parts, mesh = self.parts, self.ddp.mesh
        options = {"seed": self.config.seed, "mesh": mesh, **parts.ddp_options}
        return verify(parts.model, optimizer, parts.loss_fn, batch, **options)

    def train_batches(self) -> TrainBatches | Source:
        """This process's training batches, from the first; of a stream, from where it is."""
        if self.stream is not None:
            return self.stream
        batches, num = self.plain_batches(), self.config.data.num_workers
        return WorkerBatches(batches, num_workers=num) if num else batches

    def plain_batches(self) -> TrainBatches:
        """The batches, read by this process itself."""
        assert isinstance(self.data, DataSet), "build(config) has data unless needs_data=False"
        config = self.config.data
        own, listed = config.transforms, listed_transforms(self.config)
        order: ExampleOrder
        if self.data.order is not None:
            order = self.data.order(self.config.seed)
        else:
            path = config.sample_weights
            weights = None if path is None else load_weights(absolute(path, folder=self.folder))
            order = Order(len(self.data.train), self.config.seed, config.shuffle, weights)
        return TrainBatches(
            self.data.train,
            global_batch_size=config.global_batch_size,
            order=order,
            num_epochs=self.config.train.num_epochs,
            drop_remainder=config.drop_remainder,
            transforms=self.parts.source.augment if own is None else listed,
            on_device=True,
            multiple_of=self.ddp.steps.rows.num_micro_batches,
        )

    def _facts(self) -> JsonObject:
        assert self.data is not None
        data: JsonObject = {"description": self.data.description, "sha256": self.data.sha256}
        if self.data.classes:
            data["classes"] = list(self.data.classes)
        if isinstance(self.data, DataSet) and (scaling := normalization_of(self.data.train)):
            data["normalization"] = scaling
        return {
            "data": data,
            "world": {
                "num_processes": jax.process_count(),
                "num_devices": self.ddp.mesh.size,
                "device_kind": self.ddp.mesh.devices.flat[0].device_kind,
            },
        }


def test_batches(config: Config, data: DataSet | Streams) -> Batches:
    """This process's evaluation batches of a job."""
    if isinstance(data, Streams):
        return data.test
    # Evaluation holds no gradients: rows of one micro-batch fit wherever training fits.
    rows = max(1, config.data.global_batch_size // config.ddp.accumulate_steps)
    return eval_batches(
        data.test, global_batch_size=rows, transforms=listed_transforms(config), on_device=True
    )


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


def build(config: Config, *, needs_data: bool = True, mesh: jax.sharding.Mesh | None = None) -> Job:
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
    if process_index() == 0 and missing is not None:
        report(f"JAX runs on CPUs. {missing} {ON_PURPOSE}")


def _facts(config: Config) -> dict[str, str]:
    """Values that all processes of a job must share; the folder of the data may differ."""
    keys = {key: str(x) for key, x in flatten(config.model_dump()).items() if key != "data.dir"}
    settings = {name: str(getattr(jax.config, name)) for name in SETTINGS}
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "JAX_PLATFORMS")}
    flags["code of jddp"] = source_hash()
    return {**gpu_facts(os.environ), **keys, **versions(), **settings, **flags}
