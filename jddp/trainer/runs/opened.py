"""`jddp.open_run`: opens a run from its directory as the object that `jddp.fit` returns.

It makes only the parts of a config that an evaluation needs, so a run opens even if the code of its
optimizer, hook or callbacks is gone. Arrays that each replica kept for itself are averaged
when they are read, so all values are the same on every device, for any number of devices.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import jax
from jax.sharding import Mesh

from jddp.checkpoint.storage import local_copy
from jddp.config.files import with_overrides
from jddp.config.keys import ConfigMistakes
from jddp.config.options import Precision
from jddp.config.schema import Config
from jddp.data import DataSet
from jddp.data.source import Streams
from jddp.distributed.coordination import agree
from jddp.engine.data_parallel import DataParallel
from jddp.engine.initial_state import Misfit, fit_weights
from jddp.engine.mesh import make_mesh, replicate
from jddp.engine.state import TrainState
from jddp.ground.errors import ConfigError, DataError, Error, UsageError
from jddp.ground.typing import Batch, LossFn
from jddp.trainer.job.build import join
from jddp.trainer.job.data import open_data
from jddp.trainer.job.job import test_batches
from jddp.trainer.job.parts import find_eval_fn, find_loss, find_source
from jddp.trainer.reports.files import MetricsFile
from jddp.trainer.run import Progress, Run
from jddp.trainer.runs.saved import (
    Saved,
    config_in,
    is_trusted,
    kept_of_data,
    model_in,
    read_saved,
    refusal,
)
from jddp.zoo.models import Module
from jddp.zoo.optimizers import make_optimizer

READ = ("data", "loss")  # sections of a config that an evaluation reads


def open_run(
    run_dir: str | Path,
    *,
    model: Module | None = None,
    loss_fn: LossFn | None = None,
    checkpoint: int | str | None = None,
    params: str | None = None,
    mesh: Mesh | Sequence[jax.Device] | int | None = None,
    trust: str | None = None,
    overrides: Sequence[str] | None = None,
) -> Run:
    """Opens a finished or interrupted run, on any number of devices, without changing it.

    The run evaluates and predicts, and its `model` is the model of the checkpoint. To train
    further, call `fit` again with the same `run_dir`. The directory is not trusted: only the names
    of the model, the loss and the data in its config are resolved, and only inside jddp unless
    `trust` permits more.

    Args:
      run_dir: A run directory, or its URL.
      model: The module that was trained, instead of the one in the config. A run of `jddp.fit` has
        no config, and needs it.
      loss_fn: The loss for `evaluate`, instead of the one in the config.
      checkpoint: A step; or a folder of checkpoints, "best", to use its newest; or both,
        "best/400", as in `run.checkpoints`. By default the newest in "checkpoints".
      params: Parameters to use, "params" or "ema"; by default the ones that the run evaluated.
      mesh: Devices, as in `jddp.DataParallel`; by default all.
      trust: Code of the config that may be imported. By default only models, losses and data of
        jddp; "here" also permits code in the current folder; "package" permits the module class of
        the model anywhere, which runs the code of its package; "config" permits all code that the
        config names.
      overrides: Changed keys of data or loss, `key.path=value`, from a command, which joins the
        processes of its job. A target in them is trusted.

    Raises:
      UsageError: If there is no run, or the model is not trusted, or not given.
      ConfigError: If the config cannot be read, the checkpoint is from another model, or a key is
        unknown or does not affect an evaluation.
      FileSystemError: If there is no such checkpoint, or it is damaged.
    """
    run_dir = local_copy(run_dir)
    config = None
    ignored = () if model is None else (ConfigMistakes,)  # Settings of `fit` may be no config.
    with contextlib.suppress(*ignored):
        config = config_in(run_dir)
    module = model_in(run_dir, config, trust) if model is None else model
    keys = {override.partition("=")[0] for override in overrides or ()}
    if config is not None and overrides is not None:
        if others := sorted({key.partition(".")[0] for key in keys} - {*READ}):
            raise ConfigError(
                f"{others[0]}: an evaluation reads only the keys of {' and '.join(READ)}."
            )
        config = with_overrides(config, overrides)
        join(config, "auto")  # The devices may differ from the training's.
    trusted = set[str]()
    if config is not None:
        for key in ("data.target", _loss_key(config)):
            is_yours = not keys.isdisjoint({key, key.partition(".")[0]})
            trusted |= {key} if is_yours or is_trusted(key, config, trust, run_dir) else set()
    ddp = SavedModel(
        module,
        make_optimizer("sgd", schedule=lambda step: 0.0)[0],
        loss_fn or _loss_in(config, trusted),
        mesh=make_mesh(mesh, config.mesh.axis_name if config else None),
        batch_norm="broadcast",  # Statistics are not updated here; they are the same everywhere.
        precision=Precision(compute_dtype=config.ddp.precision.compute_dtype) if config else None,
    )
    saved, state = read_saved(run_dir, checkpoint, lambda saved: (saved, _state_of(ddp, saved)))
    run = Run(
        ddp,
        state,
        run_dir=run_dir,
        evaluation=None if config is None else OwnBatches(config, trusted, run_dir),
        eval_params=params or saved.evaluated,
        config=config.model_dump() if config else saved.beside.get("config"),
    )
    step, kept = int(saved.folder.name), saved.beside
    records = MetricsFile(run_dir / "metrics.jsonl", is_writer=False)
    run.read_earlier = records.read
    run.progress = Progress(
        step,
        metrics=kept.get("metrics", {}),
        stopped=kept.get("stopped"),
        # The last evaluation came after the checkpoint of its step.
        evaluations=[x for x in records.read() if x.get("split") == "eval" and x["step"] <= step],
    )
    return run


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """While open, errors of Flax and JAX about shapes become a `ConfigError` of one line."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        if not isinstance(error, TypeError | ValueError) and "flax" not in type(error).__module__:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            "The saved values, the model and the rows do not fit together. Give the model of the "
            f"checkpoint, and rows of the shape and dtype that it was trained on. {reason}"
        ) from error


class SavedModel(DataParallel):
    """The model of a checkpoint. Rows that do not fit it raise an error of one line."""

    evaluate = _one_line()(DataParallel.evaluate)
    predict = _one_line()(DataParallel.predict)


def _state_of(ddp: DataParallel, saved: Saved) -> TrainState:
    form = ddp.steps.spec.model
    fields = ["params", "ema_params", "key", "ema_state"]
    params, ema, key, ema_state, model_state = saved.read(fields)
    try:
        state = ddp.init(0, params={"params": params, "model_state": model_state})
        average = fit_weights(ema, state.params, partial=False)[0] if ema else None
    except Misfit as error:
        raise ConfigError(
            f"{saved.folder} does not fit the model {form.name} at {error.where}. Give the model "
            "that was trained."
        ) from error
    step = jax.numpy.asarray(int(saved.folder.name), state.step.dtype)
    key = key if jax.tree.leaves(key) else state.key
    average = {"ema_params": average, "ema_state": ema_state}
    return state.replace(**replicate({"step": step, "key": key, **average}, ddp.mesh))


class OwnBatches:
    """The evaluation batches of a config; data is read when they are first iterated."""

    def __init__(self, config: Config, trusted: set[str], run_dir: Path) -> None:
        self._config, self._trusted, self._run_dir = config, trusted, run_dir
        self._data: DataSet | Streams | None = None

    def __iter__(self) -> Iterator[Batch]:
        if "data.target" not in self._trusted:
            raise refusal("data.target", self._config, "batches")
        if self._data is None:
            self._data = open_data(find_source(self._config), self._config)
            agree("data set", {"sha256": self._data.sha256})
            kept = kept_of_data(self._run_dir).get("encoding")
            if kept and self._data.encoding != kept:  # Encoding of the columns of a table.
                raise DataError(
                    f"{self._data.description}: its training part gives other means or categories "
                    "than the run was trained with. Put the run's files train* into the "
                    "folder of the new files test*."
                )
        return iter(test_batches(self._config, self._data))


def _loss_in(config: Config | None, trusted: set[str]) -> LossFn:
    """The loss with which a config evaluates.

    Without a config, or if its code is not trusted, the returned function raises an error.
    """
    if config is None:
        reason = "A run of jddp.fit does not save its loss. Give loss_fn= to open_run."
        return _refusing(UsageError(reason))
    if (key := _loss_key(config)) in trusted:
        source = None
        # These sources know the bytes of their tokens, and read no example: others could download.
        if config.loss.name == "next_token" and config.data.name in ("tokens", "python_stdlib"):
            with contextlib.suppress(Error):  # A run can be opened without its data.
                source = find_source(config)
        return find_eval_fn(config) or find_loss(config, source)
    return _refusing(refusal(key, config, "loss_fn="))


def _loss_key(config: Config) -> str:
    """The key of the function with which a config evaluates."""
    return "loss.target" if config.loss.eval_target is None else "loss.eval_target"


def _refusing(error: UsageError) -> Callable[..., NoReturn]:
    def refuse(*args: object) -> NoReturn:
        raise error

    return refuse
