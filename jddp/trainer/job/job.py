"""Builds a job from a config: data in batches, a wrapped model, a number of steps.

job = build(config)
run = job.run()
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jddp.config.permissions import absolute, folder_or_url
from jddp.config.schema import Config
from jddp.data import DataSet, Order, TrainBatches, WorkerBatches, eval_batches, load_weights
from jddp.data.order import ExampleOrder
from jddp.data.source import Streams
from jddp.data.transforms import normalization_of
from jddp.distributed.watchdog import Limits
from jddp.engine.data_parallel import DataParallel
from jddp.engine.initial_state import Misfit
from jddp.engine.mesh import count_processes
from jddp.engine.state import TrainState, by_path
from jddp.ground.errors import ConfigError, report
from jddp.ground.names.plugins import OPTIONS, find
from jddp.ground.typing import Batch, Batches, JsonObject
from jddp.inspection.verification.findings import Verification
from jddp.inspection.verification.verify import verify
from jddp.modules.rows import as_arrays
from jddp.reduce.shards import Shape
from jddp.trainer.fit import start
from jddp.trainer.job.data import (
    listed_transforms,
)
from jddp.trainer.job.parts import Parts, Schedule, make_callbacks, optimizer_of, period_of
from jddp.trainer.options import Checks, Evaluation, Keep, Options
from jddp.trainer.prefetch import Source
from jddp.trainer.run import Callback, Run


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

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Shape of each trained parameter by its path, of one replica: each may have its own."""
        steps = self.ddp.steps
        state = steps.abstract_state(self.batch_spec)
        layouts = by_path(steps.layouts(state).params)
        params = by_path(state.params).items()
        return {path: layouts[path].one_device_shape(x.shape) for path, x in params}

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
        train, place, own = config.train, config.run.dir, make_callbacks(config)
        with contextlib.closing(self.train_batches()) as batches:
            state = self.first_state()
            options = Options(
                num_steps=train.num_steps,
                num_epochs=train.num_epochs,
                log_every_steps=train.log_every_steps,
                eval_every_steps=period_of(train, "eval_"),
                save_every_steps=period_of(config.checkpoint),
                keep=Keep(config.checkpoint.keep, config.checkpoint.keep_every_steps),
                resume=config.checkpoint.resume,
                evaluation=Evaluation(
                    test_batches(config, self.data), train.eval_params, train.limit_eval_batches
                ),
                learning_rate=self.learning_rate,
                checks=Checks(
                    replicas_every_steps=train.check_replicas_every_steps,
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
        optimizer, peak = optimizer_of(self.config, self.num_steps or 1, at_peak=True)
        with contextlib.closing(self.train_batches()) as batches:
            batch = batches.peek() if isinstance(batches, Source) else batches.batch(0)
        parts, mesh = self.parts, self.ddp.mesh
        options = {"seed": self.config.seed, "mesh": mesh, **parts.ddp_options}
        report = verify(parts.model, optimizer, parts.loss_fn, batch, **options)
        if peak is None or self.learning_rate is None or np.isclose(peak(0), self.learning_rate(0)):
            return report
        note = f"The update uses the peak learning rate of the schedule, {peak(0):.3g}."
        return dataclasses.replace(report, findings=(note, *report.findings))

    def train_batches(self) -> TrainBatches | Source:
        """This process's training batches, from the first; of a stream, from where it is."""
        if self.stream is not None:
            return self.stream
        batches, num = self.plain_batches(), self.config.data.num_workers
        return WorkerBatches(batches, num_workers=num) if num else batches

    def plain_batches(self) -> TrainBatches:
        """The batches, read by this process itself."""
        assert isinstance(self.data, DataSet), "build(config) has data unless needs_data=False"
        own, listed = self.config.data.transforms, listed_transforms(self.config)
        return TrainBatches(
            self.data.train,
            global_batch_size=self.config.data.global_batch_size,
            order=order_of(self.config, self.data, self.folder),
            num_epochs=self.config.train.num_epochs,
            drop_remainder=self.config.data.drop_remainder,
            transforms=self.parts.source.augment if own is None else listed,
            on_device=True,
            multiple_of=self.ddp.steps.rows.num_micro_batches,
        )

    def _facts(self) -> JsonObject:
        assert self.data is not None
        data: JsonObject = {"description": self.data.description, "sha256": self.data.sha256}
        if self.data.classes:
            data["classes"] = list(self.data.classes)
        if self.data.encoding:
            data["encoding"] = self.data.encoding
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


def order_of(config: Config, data: DataSet, folder: Path | None) -> ExampleOrder:
    """The order of the examples of a run."""
    if data.order is not None:
        return data.order(config.seed)
    path = config.data.sample_weights
    weights = None if path is None else load_weights(absolute(path, folder=folder))
    return Order(len(data.train), config.seed, config.data.shuffle, weights)


def test_batches(config: Config, data: DataSet | Streams) -> Batches:
    """This process's evaluation batches of a job."""
    if isinstance(data, Streams):
        return data.test
    # Evaluation holds no gradients: rows of one micro-batch fit wherever training fits.
    rows = max(1, config.data.global_batch_size // config.ddp.accumulate_steps)
    return eval_batches(
        data.test,
        global_batch_size=rows,
        transforms=listed_transforms(config),
        on_device=True,
    )
