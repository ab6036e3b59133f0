"""`jddp.open_run`: opens a run from its directory as the object that `jddp.fit` returns.

It makes only the parts of a config that an evaluation needs, so a run opens even if the code of its
optimizer, hook or callbacks is gone. Arrays that each replica kept for itself are averaged
when they are read, so all values are the same on every device, for any number of devices.

A run directory is data: its config may come from somebody else. By default only models, losses and
data of jddp itself are found by their names; a word of yours permits more.

| word      | permits                                                                            |
|-----------|------------------------------------------------------------------------------------|
| "package" | the model's class in any package, whose code runs when it is imported               |
| "config"  | all code that the config names, as for a config on the command line                 |
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jddp.checkpoint import reader
from jddp.checkpoint.folders import finished
from jddp.checkpoint.storage import local_copy
from jddp.config.files import read_stored, with_overrides
from jddp.config.keys import ConfigMistakes
from jddp.config.options import Precision
from jddp.config.schema import Config
from jddp.data import DataSet
from jddp.data.source import Streams
from jddp.distributed.coordination import agree
from jddp.engine.data_parallel import DataParallel
from jddp.engine.evaluation import with_average
from jddp.engine.initial_state import Misfit, fit_weights
from jddp.engine.mesh import make_mesh, replicate
from jddp.engine.state import TrainState, Values
from jddp.ground.errors import ConfigError, Error, FileSystemError, UsageError, check_choice
from jddp.ground.names import resolve_target
from jddp.ground.typing import Batch, JsonObject, LossFn
from jddp.trainer.job.build import join, test_batches
from jddp.trainer.job.data import open_data
from jddp.trainer.job.parts import find_eval_fn, find_loss, find_source
from jddp.trainer.reports.files import MetricsFile
from jddp.trainer.run import Progress, Run
from jddp.trainer.saving import BEST
from jddp.zoo.models import Module, is_module_class, make_model
from jddp.zoo.optimizers import make_optimizer

OWN_MODELS = "jddp.zoo.models"


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the run data that it keeps with its arrays.

    Attributes:
      folder: Folder of the checkpoint.
      beside: The run data.
    """

    folder: Path
    beside: JsonObject

    @property
    def evaluated(self) -> str:
        """The parameters that the run itself evaluated, "params" or "ema"."""
        return str(self.beside.get("plan", {}).get("eval_params", "params"))

    def read(self, fields: Sequence[str]) -> list[Any]:
        """The fields, and the model's other state; per-replica arrays are averaged."""
        saved = reader.read_values(self.folder, [*fields, "model_state"])
        return [saved[name] for name in (*fields, "model_state")]

    def evaluated_values(self) -> Values:
        """The parameters that the run evaluated, and their other state."""
        if self.evaluated == "params":
            params, model_state = self.read(["params"])
            return params, model_state
        params, ema_state, model_state = self.read(["ema_params", "ema_state"])
        return params, with_average(model_state, ema_state)


def _find(run_dir: Path, chosen: int | str | None) -> Path:
    """The folder of a checkpoint that is not damaged.

    Args:
      run_dir: The run directory.
      chosen: A step; or a folder of checkpoints, to use its newest undamaged one, or "best", to use
        its best undamaged one; or both, "best/400". By default the newest in "checkpoints".
    """
    text = "checkpoints" if chosen is None else str(chosen)
    above, _, step = text.rpartition("/")
    directory = run_dir / ((above or "checkpoints") if step.isdecimal() else text)
    if not step.isdecimal():
        step = str(_first_sound(directory))
    elif int(step) not in (steps := finished(directory)):
        raise FileSystemError(f"{directory} holds no step {step}. Choose one of {steps}.")
    elif fault := reader.find_fault(directory / step):
        raise FileSystemError(f"{directory / step} is damaged: {fault}. Choose another.")
    return directory / step


def _first_sound(directory: Path) -> int:
    """The best undamaged checkpoint of a folder; where none is ranked, the newest.

    The newest has the ranking: each checkpoint that changes it is saved.
    """
    newest = reader.newest_sound(directory)
    if directory.name != BEST:
        return newest
    ranked = reader.read_object(directory / str(newest) / "run.json").get("best", [])
    there = [step for step in ranked if step in finished(directory)]
    return next((x for x in there if reader.find_fault(directory / str(x)) is None), newest)


def config_in(run_dir: Path) -> Config | None:
    """The config of a run; None for a run of `jddp.fit`, which keeps none.

    Raises:
      UsageError: If there is no run.
      ConfigError: If the config cannot be read.
    """
    path = run_dir / "config.yaml"
    if path.exists():
        return read_stored(path)
    if not (run_dir / "checkpoints").is_dir():
        raise UsageError(
            f"{run_dir} is no run directory: it has neither config.yaml nor checkpoints. Give the "
            "run.dir or run_dir= of a run."
        )
    return None


def kept_of_data(run_dir: Path | None) -> JsonObject:
    """The data of a run's newest start, with classes; empty if it kept none."""
    try:
        first = json.loads((Path(run_dir or "") / "manifest.json").read_bytes())
        return dict(first.get("later_starts", [first])[-1]["data"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # An old run kept none.
        return {}


def model_in(run_dir: Path, config: Config | None, trust: str | None) -> Module:
    """The module that a config names, as far as `trust` permits.

    Raises:
      UsageError: If its class may not be imported, or is no Flax module class.
    """
    check_choice("trust", trust, (None, "package", "config"))
    if config is None:
        keeps_none = f"{run_dir} holds a run of jddp.fit, which saves no config."
        raise UsageError(
            f"{keeps_none} Give model=, the module that was trained.",
            in_shell=f"{keeps_none} A command cannot make its model. In Python, use "
            "jddp.open_run(run_dir, model=, loss_fn=).",
        )
    kwargs, target = config.model.kwargs, config.model.target
    if target is None:
        return make_model(config.model.name, kwargs=kwargs)
    if trust is None and not f"{target.partition(':')[0]}.".startswith(f"{OWN_MODELS}."):
        raise refusal("model.target", config, "model=")
    found = resolve_target(target, key="model.target")
    if not (trust == "config" or is_module_class(found)):
        raise UsageError(
            f"model.target {target!r} is no Flax module class. If you trust all code that the "
            "config of the run names, add trust='config' (--trust config)."
        )
    return make_model(found, kwargs=kwargs)


def refusal(key: str, config: Config, instead: str) -> UsageError:
    """The error of a model, a loss, or data, that may not be imported.

    Args:
      key: Key of the config that names it.
      config: Config of the run.
      instead: Argument that can be given in its place.
    """
    what = f"{key} {_target_at(key, config)!r}, which the run directory names, is not imported."
    trusted = "package, for the class of the model; or config, for all that the config names"
    return UsageError(
        f"{what} Give {instead}; or trust=: {trusted}.", in_shell=f"{what} Add --trust {trusted}."
    )


def _target_at(key: str, config: Config) -> str | None:
    section, _, name = key.partition(".")
    found: str | None = getattr(getattr(config, section), name)
    return found


READ = ("data", "loss")  # sections of a config that an evaluation reads


def open_run(
    run_dir: str | Path,
    *,
    model: Module | None = None,
    loss_fn: LossFn | None = None,
    checkpoint: int | str | None = None,
    params: str | None = None,
    mesh: jax.sharding.Mesh | Sequence[jax.Device] | int | None = None,
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
        jddp; "package" also permits the module class of the model anywhere, which runs the code of
        its package; "config" permits all code that the config names.
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
            if is_yours or trust == "config" or _target_at(key, config) is None:
                trusted.add(key)
    ddp = SavedModel(
        module,
        make_optimizer("sgd", schedule=lambda step: 0.0)[0],
        loss_fn or _loss_in(config, trusted),
        mesh=make_mesh(mesh, config.mesh.axis_name if config else None),
        batch_norm="broadcast",  # Statistics are not updated here; they are the same everywhere.
        precision=Precision(compute_dtype=config.ddp.precision.compute_dtype) if config else None,
    )
    folder = _find(run_dir, checkpoint)
    saved = Saved(folder, reader.read_object(folder / "run.json"))
    state = _state_of(ddp, saved)
    run = Run(
        ddp,
        state,
        run_dir=run_dir,
        evaluation=None if config is None else OwnBatches(config, trusted),
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

    def __init__(self, config: Config, trusted: set[str]) -> None:
        self._config, self._trusted = config, trusted
        self._data: DataSet | Streams | None = None

    def __iter__(self) -> Iterator[Batch]:
        if "data.target" not in self._trusted:
            raise refusal("data.target", self._config, "batches")
        if self._data is None:
            self._data = open_data(find_source(self._config), self._config)
            agree("data set", {"sha256": self._data.sha256})
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
