"""Sorts the values of a record for sinks with charts, such as TensorBoard.

chart_of("loss", "train")              # "loss/train", in the group of "loss/eval"
chart_of("step_seconds", "train")      # "time/step_seconds"
scalars(record), arrays(record)        # by chart; texts, images and distributions of callbacks
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jddp.typing import Record

_GROUPS = {
    "optimizer": ("learning_rate", "grad_norm", "loss_scale", "skipped", "spike"),
    "time": ("epoch", "step_seconds", "data_wait_seconds", "host_seconds", "exposed_communication"),
    "processes": ("slowest_process", "slowest_ratio"),
    "speed": ("examples_per_second", "tokens_per_second", "model_flops_per_second", "mfu"),
    "memory": ("peak_memory_bytes", "predicted_memory_bytes"),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}


def chart_of(name: str, split: str) -> str:
    """Returns the chart of a value, after its group and a slash."""
    if name in _GROUP_OF:
        return f"{_GROUP_OF[name]}/{name}"
    return f"{name}/{split}" if split in ("train", "eval") else name


def scalars(record: Record) -> dict[str, float]:
    """Returns the numbers of a record by chart."""
    return {chart: x for chart, x in _values(record) if isinstance(x, int | float)}


def arrays(record: Record) -> dict[str, list[object]]:
    """Returns the lists of a record by chart."""
    return {chart: x for chart, x in _values(record) if isinstance(x, list)}


def texts(record: Record) -> dict[str, str]:
    """Returns the texts of a callback's record by chart."""
    if record["split"] != "callback":
        return {}
    return {chart: x for chart, x in _values(record) if isinstance(x, str)}


def images(record: Record) -> dict[str, np.ndarray]:
    """Returns the images of a callback's record, uint8 `(n, h, w, channels)`, by chart."""
    return {chart: _as_images(x) for chart, x in _numpy(record) if x.dtype == np.uint8}


def distributions(record: Record) -> dict[str, np.ndarray]:
    """Returns the finite numbers of each other array of a callback's record, by chart."""
    return {chart: x[np.isfinite(x)] for chart, x in _numpy(record) if x.dtype != np.uint8}


def finite_numbers(values: Sequence[object]) -> list[float]:
    """Returns the finite numbers of a list; none of a list of lists."""
    return [x for x in values if isinstance(x, int | float) and math.isfinite(x)]


def _numpy(record: Record) -> Iterator[tuple[str, np.ndarray]]:
    return ((chart, x) for chart, x in _values(record) if isinstance(x, np.ndarray))


def _as_images(x: np.ndarray) -> np.ndarray:
    """An image of one channel, or one with a dim for channels, or several, as several."""
    by_channel = x[..., None] if x.ndim == 2 else x
    return by_channel[None] if by_channel.ndim == 3 else by_channel


def _values(record: Record) -> Iterator[tuple[str, object]]:
    for name, value in record.items():
        if name not in ("step", "split"):
            yield chart_of(name, record["split"]), value
