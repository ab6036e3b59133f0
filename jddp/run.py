"""A run in progress or finished: what callbacks see and `fit` returns."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jddp.errors import ConfigError
from jddp.state import TrainState

_NAME = re.compile(r"\w[\w-]*", re.ASCII)


class Run:
    """A run in progress or finished: what callbacks see and `fit` returns.

    Attributes:
      state: The newest state.
      step: Its finished optimizer steps.
      metrics: The last train record, a dict of floats.
      evaluations: The records of all evaluations, those before a resume included.
      run_dir: Where the run keeps its files, or None.
      stopped: Why a callback has ended the run, or None.
      interrupted: The signal at which it stopped before its end, saved so that it goes on when it
        is started again; or None.
    """

    def __init__(self, state: TrainState, run_dir: Path | None, save: Callable[..., None]) -> None:
        self.state = state
        self.step = 0
        self.metrics: dict[str, Any] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.run_dir = run_dir
        self.stopped: str | None = None
        self.interrupted: str | None = None
        self._save = save

    @property
    def eval_metrics(self) -> dict[str, Any]:
        """The record of the last evaluation; empty before the first."""
        return self.evaluations[-1] if self.evaluations else {}

    def stop(self, reason: str) -> None:
        """Ends the run after the step under way; `reason` is reported."""
        self.stopped = self.stopped or reason

    def save(self, where: str = "checkpoints") -> None:
        """Writes a checkpoint of the newest state into a folder of the run directory.

        Raises:
          ConfigError: If `where` is no plain name.
        """
        if not _NAME.fullmatch(where):
            raise ConfigError(
                f"Checkpoints are kept in a folder of the run directory, and {where!r} is no plain "
                "name of one. Take letters, digits, '_' and '-'."
            )
        self._save(where)

    def __repr__(self) -> str:
        """Step, metrics and directory in one line."""
        shown = {**self.metrics, **{f"eval {k}": v for k, v in self.eval_metrics.items()}}
        numbers = ", ".join(
            f"{name} {value:.4g}"
            for name, value in shown.items()
            if isinstance(value, float | int) and not name.endswith("step")
        )
        return f"Run(step {self.step}: {numbers}; {self.run_dir or 'no directory'})"
