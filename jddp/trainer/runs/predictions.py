"""Predictions of a saved run for the rows of a file, and the examples of a step.

    predict_file("runs/mine", Path("new.npz"), Path("predictions.csv"))
    rows_of_step("runs/mine", 1200).examples    # their numbers in the training data, in order

If the outputs are logits of classes, the likeliest class and the probability of each come first.
New rows are prepared like the test rows of the run: images of uint8 or uint16 are normalized,
images of a folder are decoded as the run's image folder or tar files were, and columns of a table
are encoded as the run's table was. Other arrays are used as they are.

The order of examples is a function, so nothing needs to be recorded of a step.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jddp.checkpoint.folders import finished
from jddp.checkpoint.reader import read_object
from jddp.checkpoint.storage import local_copy
from jddp.config.permissions import absolute
from jddp.config.schema import Config
from jddp.data import ArrayExamples, eval_batches
from jddp.data.examples import Concatenated, Examples
from jddp.data.sources.arrays import map_npy, map_npz
from jddp.data.sources.images import images_in
from jddp.data.sources.table import ENDINGS, Encoding, rows_in
from jddp.data.transforms import LARGEST, Transform, Transformed, normalize
from jddp.distributed.identity import resolve_identity
from jddp.engine.state import by_path
from jddp.ground.errors import (
    ConfigError,
    DataError,
    FileSystemError,
    UsageError,
    check_choice,
    file_errors,
    printable,
)
from jddp.ground.files import replace_file
from jddp.ground.typing import JsonObject
from jddp.trainer.job.data import listed_transforms
from jddp.trainer.job.job import batches_in_order
from jddp.trainer.job.parts import find_source
from jddp.trainer.runs.opened import open_run
from jddp.trainer.runs.saved import TRUST, config_in, is_trusted, kept_of_data, refusal

INPUTS = ("image", "tokens", "x")  # Names that `jddp.modules.base.outputs` looks for.
OF_IMAGES = ("image_folder", "webdataset")  # sources of images that are files

Arrays = Mapping[str, np.ndarray]


def predict_file(run_dir: str | Path, data: Path, out: Path, **chosen: Any) -> int:
    """Writes the predictions for all rows of a file, in their order; returns their number.

    Args:
      run_dir: A run directory, or its URL.
      data: A .npz file of arrays by name; a .npy file of the inputs; for a run of a table, a .csv
        or .parquet file with its columns; or a folder of images, whose names are written too.
      out: A file to write: .npz or .csv.
      **chosen: Further arguments of `open_run`.

    Raises:
      UsageError: If the suffix of a file is unknown, or there are several processes.
      DataError: If the file holds no inputs, or pixels, which the run does not normalize.
      FileSystemError: If `out` cannot be written.
    """
    if out.suffix not in WRITERS:
        raise UsageError(f"--out {out}: predictions are written to {', '.join(WRITERS)}.")
    if not out.absolute().parent.is_dir():
        raise FileSystemError(f"--out {out}: the folder {out.absolute().parent} does not exist.")
    if resolve_identity().num_processes > 1:
        raise UsageError("predict writes one file: run it in one process, which has all devices.")
    # Opening a run may import the module of its model, which may change the working directory.
    data, out = absolute(data), absolute(out)
    run = open_run(run_dir, **chosen)
    config = Config(**(run.config or {}))
    kept = kept_of_data(run.run_dir)
    rows = _rows_of(data, config, kept)
    batches = eval_batches(rows, global_batch_size=config.data.global_batch_size)
    found = by_path(run.predict(batches))
    arrays = {name or "predictions": x for name, x in found.items()}
    is_classifier = config.loss.name == "cross_entropy"
    arrays = _classified(arrays, kept.get("classes", []), is_classifier=is_classifier) | arrays
    files = getattr(rows, "files", None)
    if files is not None:
        arrays = {"file": np.array(files), **arrays}
    with file_errors(f"{out} cannot be written"):
        replace_file(out, WRITERS[out.suffix](arrays))
    return len(rows)


def _rows_of(path: Path, config: Config, kept: JsonObject) -> Examples:
    """The rows of a table, a folder of images or a file of arrays, prepared like the test rows."""
    if path.suffix in ENDINGS:
        if "encoding" not in kept:
            raise UsageError(
                f"--data {path}: the run was not trained on a table, so it has no columns to read."
            )
        return rows_in(path, Encoding(**kept["encoding"]))
    if path.is_dir():
        if config.data.name not in OF_IMAGES:
            raise UsageError(f"--data {path} is a folder, but the run was not trained on images.")
        return images_in(path, **config.data.kwargs)
    return _arrays_in(path, config, kept)


def _arrays_in(path: Path, config: Config, kept: JsonObject) -> Examples:
    """The rows of a file of arrays; images of uint8 and uint16 are scaled."""
    if path.suffix not in (".npz", ".npy"):
        raise UsageError(
            f"--data {path}: rows are read from .npz and .npy, or .csv and .parquet "
            "for a run of a table. Convert them."
        )
    if path.suffix == ".npz":
        arrays = map_npz(path)
    else:
        array = map_npy(path)
        arrays = {"image" if array.ndim == 4 else "x": array}
    inputs = next((arrays[name] for name in INPUTS if name in arrays), None)
    if inputs is None:
        raise DataError(
            f"{path} holds {', '.join(arrays)}, but no inputs: name them image, tokens or x. For "
            "other names, use jddp.open_run(run_dir).predict(batches, function) in Python."
        )
    rows = ArrayExamples(arrays)
    if inputs.ndim != 4 or inputs.dtype.kind == "f":
        return rows
    if "normalization" in kept:
        scaling: Transform | None = normalize(**kept["normalization"])
    else:
        scaling = next((x for x in listed_transforms(config) if not x.num_draws), None)
    if inputs.dtype.name not in LARGEST or scaling is None:
        raise DataError(
            f"{path}: images are {inputs.dtype}. Give floating-point images, normalized like the "
            "images of the run."
        )
    return Transformed(rows, scaling)


def _classified(
    arrays: Arrays, names: Sequence[str], *, is_classifier: bool
) -> dict[str, np.ndarray]:
    """The likeliest class of each row, by name if it has one, and the probability of each class.

    Empty if the outputs are not logits: the loss is not cross entropy, and the number of outputs
    is not the number of class names.
    """
    logits = arrays.get("predictions", np.zeros(()))
    is_named = logits.ndim == 2 and len(names) == logits.shape[1]
    if logits.ndim != 2 or not (is_classifier or is_named):
        return {}
    classes = np.array(names) if is_named else np.arange(logits.shape[1])
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    shares = (shifted / shifted.sum(-1, keepdims=True)).astype(np.float32)
    probabilities = {f"probability.{name}": x for name, x in zip(classes, shares.T, strict=True)}
    return {"label": classes[logits.argmax(-1)], **probabilities}


def _npz(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    # Other programs cannot read bfloat16.
    known = {name: x.astype("float32") if x.dtype.kind == "V" else x for name, x in arrays.items()}
    np.savez(file, allow_pickle=False, **known)
    return file.getvalue()


def _csv(arrays: Arrays) -> bytes:
    flat = {name: x.reshape(len(x), -1) for name, x in arrays.items()}
    names = [
        f"{n}.{i}" if arrays[n].ndim > 1 else n for n, x in flat.items() for i in range(x.shape[1])
    ]
    rows = zip(*(x.tolist() for x in flat.values()), strict=True)
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([names, *(chain(*row) for row in rows)])
    return text.getvalue().encode()


WRITERS: dict[str, Callable[[Arrays], bytes]] = {".npz": _npz, ".csv": _csv}


@dataclass(frozen=True)
class Rows:
    """The examples of a step, over all processes.

    Attributes:
      step: Number of the step, from 1.
      epoch: Passes over the data before its first example.
      examples: Number of each example in the training data, in the order of the global batch.
      names: Name of each example, if the data have names: a file or, in a mixture, the folder and
        the number there; else empty.
    """

    step: int
    epoch: float
    examples: tuple[int, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        """A sentence, and a line for each example."""
        count = f"{len(self.examples):,} examples, from epoch {self.epoch:.3f} on"
        names = self.names or ("",) * len(self.examples)
        pairs = zip(self.examples, names, strict=True)
        lines = (
            f"{row:>6} {example:>12}  {printable(name)}".rstrip()
            for row, (example, name) in enumerate(pairs)
        )
        return "\n".join([f"step {self.step:,}: {count}", f"{'row':>6} {'example':>12}", *lines])


def rows_of_step(run_dir: str | Path, step: int, *, trust: str | None = None) -> Rows:
    """Finds the examples of a step from the config of a run and its data; nothing is trained.

    Positions are counted from the newest checkpoint, so a run that continues another one, or whose
    batch size has changed, is right from its last start on.

    Args:
      run_dir: A run directory, or its URL; the run may be training.
      step: Number of the step, from 1.
      trust: Code of the config that may be imported, as for `jddp.open_run`.

    Raises:
      UsageError: If there is no run, it has no config, or its data may not be imported.
      ConfigError: If there is no such step.
      DataError: If the data are absent, or have changed since the run began.
    """
    run_dir = local_copy(run_dir)
    config = config_in(run_dir)
    if config is None:
        raise UsageError(
            f"{run_dir} holds a run of jddp.fit, which saves no config: ask its batches, "
            "TrainBatches.examples_before."
        )
    check_choice("trust", trust, TRUST)
    if not is_trusted("data.target", config, trust, run_dir):
        raise refusal("data.target", config, "the data by data.name")
    data = find_source(config).load()
    digest = kept_of_data(run_dir).get("sha256")
    if digest and data.sha256 and data.sha256 != digest:
        raise DataError(
            f"The data have changed since the run began (sha256 {digest[:12]}, now "
            f"{data.sha256[:12]}), and with them the examples of its steps. Restore the data."
        )
    batches = batches_in_order(config, data, process_index=0, num_processes=1)
    saved, position = 0, 0
    if steps := finished(run_dir / "checkpoints"):
        saved = steps[-1]
        beside = read_object(run_dir / "checkpoints" / str(saved) / "run.json")
        position = int(beside["position"]["state"]["position"])
    end = position + (step - saved) * batches.global_batch_size
    first = end - batches.global_batch_size
    left = (batches.positions_left().stop - position) // batches.global_batch_size
    num_steps = config.train.num_steps or saved + left
    if not (1 <= step <= num_steps and first >= 0):
        raise ConfigError(f"--step {step}: the steps of this run are 1 to {num_steps:,}.")
    examples = batches.examples_before({"position": end})
    files = getattr(data.train, "files", None)
    names = [] if files is None else [str(files[i]) for i in examples]
    if isinstance(data.train, Concatenated):
        names = list(data.train.places(examples))
    return Rows(step, first / batches.num_examples, tuple(map(int, examples)), tuple(names))
