"""Callbacks, which get only reduced values.

Loss and metrics are equal on every process. So a callback makes the same decision on all processes,
and no process waits for another one forever.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from jddp.trainer.run import Run

log = logging.getLogger("jddp")


class Callback:
    """Base class of callbacks; override the methods you need. Every process calls all of them.

    Only `on_exception` may be called by some processes alone.
    """

    def on_begin(self, run: Run) -> None:
        """Called once, before the first step or evaluation; a resumed run is restored by then."""

    def on_step(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each optimizer step, `metrics["step"]`; `run.state` may be one ahead."""

    def on_epoch(self, run: Run, number: int) -> None:
        """Called after `on_step` of the step that takes the last example of an epoch.

        An epoch may end inside a batch, whose other rows belong to the next one. Only batches of
        `jddp.data.TrainBatches` know their epochs; with others it is not called. A run that goes
        back at a loss spike may end an epoch again.

        Args:
          run: The run, which may be one step ahead.
          number: Number of epochs since the beginning of the run, those before a resume included.
        """

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation of `run.state`."""

    def on_save(self, run: Run) -> None:
        """Called when a checkpoint save has started; it completes in the background."""

    def on_end(self, run: Run) -> None:
        """Called once, after the last step, evaluation and checkpoint."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called where an exception ends the run, after a checkpoint was saved, if one could be.

        The exception is raised afterwards; one of this method is logged. Of several processes those
        that fail call it: do not communicate here. A signal is no exception.
        """


def call_each(callbacks: Sequence[Callback], hook: Callable[[Callback], None]) -> None:
    """Calls a hook of every callback, even after one has raised.

    So no callback misses a call because of another one. In a job all processes call the same hooks,
    and none waits for a save that another process has left out.

    Raises:
      BaseException: The first exception of a hook; later ones are logged.
    """
    errors = list[BaseException]()
    for callback in callbacks:
        try:
            hook(callback)
        except KeyboardInterrupt:  # to exit at once
            raise
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        log.error("A callback has failed after another one: %r", later, exc_info=later)
    if errors:
        raise errors[0]
