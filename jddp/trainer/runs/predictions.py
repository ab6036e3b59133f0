"""Predictions of a saved run for the rows of a file.

    predict_file("runs/mine", Path("new.npz"), Path("predictions.csv"))

If the outputs are logits of classes, the likeliest class and the probability of each come first.
New rows are prepared like the test rows of the run: images of uint8 or uint16 are normalized,
images of a folder are decoded as the run's image folder or tar files were. Other arrays are used
as they are.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jddp.config.schema import Config
from jddp.data import ArrayExamples, eval_batches
from jddp.data.examples import Examples
from jddp.data.sources.arrays import map_npy, read_npz
from jddp.data.sources.images import images_in
from jddp.data.transforms import LARGEST, Transform, Transformed, normalize
from jddp.distributed.identity import resolve_identity
from jddp.engine.state import by_path
from jddp.ground.errors import DataError, FileSystemError, UsageError, file_errors
from jddp.ground.files import absolute, replace_file
from jddp.ground.typing import JsonObject
from jddp.trainer.job.data import listed_transforms
from jddp.trainer.runs.opened import kept_of_data, open_run

INPUTS = ("image", "tokens", "x")  # Names that `jddp.modules.base.outputs` looks for.
OF_IMAGES = ("image_folder", "webdataset")  # sources of images that are files

Arrays = Mapping[str, np.ndarray]


def predict_file(run_dir: str | Path, data: Path, out: Path, **chosen: Any) -> int:
    """Writes the predictions for all rows of a file, in their order; returns their number.

    Args:
      run_dir: A run directory, or its URL.
      data: A .npz file of arrays by name; a .npy file of the inputs; or a folder of images, whose
        names are written too.
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
    """The rows of a folder of images or a file of arrays, prepared like the test rows.

    Arrays of images of uint8 and uint16 are scaled.
    """
    if path.is_dir():
        if config.data.name not in OF_IMAGES:
            raise UsageError(f"--data {path} is a folder, but the run was not trained on images.")
        return images_in(path, **config.data.kwargs)
    if path.suffix not in (".npz", ".npy"):
        raise UsageError(f"--data {path}: rows are read from .npz and .npy. Convert them.")
    if path.suffix == ".npz":
        arrays = read_npz(path)
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
