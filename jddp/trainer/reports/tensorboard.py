"""Event files in the run directory, which `tensorboard --logdir RUNS` shows.

    loss/train, loss/eval, accuracy/eval       the loss and each metric, training beside evaluation
    optimizer/learning_rate, time/step_seconds and so on: `charts` has the groups
    recall/eval                                a metric that is an array: a histogram, and a table
    samples, ...                               text, images and histograms that callbacks log
    config                                     the config as text, and as hyperparameters

If a run resumes, TensorBoard hides the earlier values of steps that are taken again.
"""

from collections.abc import Iterable

import numpy as np

from jddp.config.files import dump_values, flatten
from jddp.trainer.reports import charts
from jddp.trainer.reports.lines import table_of
from jddp.trainer.reports.sink import Start
from jddp.typing import Record, Settings

COLUMNS = 240  # of a page
PLAIN = bool | int | float | str
RESULTS = ("loss/train", "loss/eval")  # beside hyperparameters


class TensorBoard:
    """A sink that writes event files of TensorBoard.

    Args:
      start: The start of the run, which has a run directory.
    """

    def __init__(self, start: Start) -> None:
        from tensorboardX import SummaryWriter  # which changes loggers and warnings

        resumed = {"purge_step": start.step + 1} if start.step else {}
        suffix = f".{start.step}"  # A start within the same second has a file of its own.
        self._writer = SummaryWriter(str(start.run_dir), filename_suffix=suffix, **resumed)
        if start.config:
            self._add_config(start.config)
        self._writer.flush()

    def log(self, record: Record) -> None:
        """Adds the values of a record."""
        step = record["step"]
        for chart, value in charts.scalars(record).items():
            self._writer.add_scalar(chart, value, step)
        for chart, values in charts.arrays(record).items():
            self._add_array(chart, values, step)
        for chart, text in charts.texts(record).items():
            self._writer.add_text(chart, _as_typed(text.splitlines()), step)
        for chart, pixels in charts.images(record).items():
            self._writer.add_images(chart, pixels, step, dataformats="NHWC")
        for chart, numbers in charts.distributions(record).items():
            self._add_histogram(chart, numbers, step)
        self._writer.flush()  # A page shows it now, and a process that is killed keeps it.

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()

    def _add_array(self, chart: str, values: list[object], step: int) -> None:
        if numbers := charts.finite_numbers(values):
            self._add_histogram(chart, np.array(numbers), step)
        self._writer.add_text(chart, _as_typed(table_of("", values, COLUMNS)), step)

    def _add_histogram(self, chart: str, numbers: np.ndarray, step: int) -> None:
        try:
            self._writer.add_histogram(chart, numbers, step)
        except ValueError as error:  # None is finite, or all are beyond 1e20.
            self._writer.add_text(chart, f"no histogram: {error}", step)

    def _add_config(self, config: Settings) -> None:
        from tensorboardX.summary import hparams

        self._writer.add_text("config", _as_typed(dump_values(config).splitlines()))
        plain = {k: x if isinstance(x, PLAIN) else str(x) for k, x in flatten(config).items()}
        experiment, session, _ = hparams(plain, dict.fromkeys(RESULTS, 0))
        for summary in (experiment, session):
            self._writer.file_writer.add_summary(summary)


def _as_typed(lines: Iterable[str]) -> str:
    """Markdown that shows lines as they are."""
    return "\n".join(f"    {line}" for line in lines)
