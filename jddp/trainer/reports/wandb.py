"""A run of Weights & Biases, or a local one that `wandb sync` uploads (WANDB_MODE=offline).

Charts are those of TensorBoard, over the step of their records. Its own variables and files choose
project, team and mode (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE), and have the credentials.
"""

import secrets
from pathlib import Path

from jddp.errors import ConfigError
from jddp.files import make_folder, replace_file
from jddp.trainer.reports import charts
from jddp.trainer.reports.lines import shape_of
from jddp.trainer.reports.sink import Start
from jddp.typing import Record


class WeightsAndBiases:
    """A sink that logs to Weights & Biases; a run that resumes keeps its id.

    Args:
      start: The start of the run, which has a run directory.

    Raises:
      ConfigError: If there are no credentials.
    """

    def __init__(self, start: Start) -> None:
        import wandb

        assert start.run_dir is not None, "its word needs one"
        # Otherwise a terminal is asked for a key, in the middle of the progress.
        is_online = wandb.setup().settings.mode == "online"
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ConfigError("no credentials. Call `wandb login`, or set WANDB_MODE=offline.")
        self._wandb = wandb
        self._run = wandb.init(
            dir=start.run_dir,
            name=start.run_dir.name,
            id=_id_of(start.run_dir / "wandb"),
            resume="allow",
            config=dict(start.config),
            settings=wandb.Settings(console="off"),  # The terminal belongs to the loop.
        )
        # Its own step counts calls, of which a step may have two, and never goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        """Logs the values of a record."""
        shown = {chart: self._shown(values) for chart, values in charts.arrays(record).items()}
        for chart, pixels in charts.images(record).items():
            shown[chart] = [self._wandb.Image(image) for image in pixels]
        for chart, numbers in charts.distributions(record).items():
            shown[chart] = self._wandb.Histogram(numbers)
        shown |= charts.texts(record)
        self._run.log({"step": record["step"], **charts.scalars(record), **shown})

    def close(self) -> None:
        """Waits until all is uploaded."""
        self._run.finish()

    def _shown(self, values: list[object]) -> object:
        """A table of a list of lists, a histogram of a list of numbers."""
        shape = shape_of(values)
        if len(shape) == 2:
            return self._wandb.Table(data=values, columns=[str(i) for i in range(shape[1])])
        return self._wandb.Histogram(charts.finite_numbers(values))


def _id_of(folder: Path) -> str:
    """The id of the run, which the first start chooses."""
    file = folder / "id"
    if not file.exists():
        make_folder(folder)
        replace_file(file, secrets.token_hex(4).encode())
    return file.read_text()
